"""Events that a component reports with a step, for the metrics stream."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepEvent:
    """Event of a replica during one step."""

    name: str
    """Name of the event in the metrics file, such as "quorum", "healed" or "step_failed"."""
    values: Mapping[str, Any]
