"""How far a replica is, read from the files that it writes. Layer: above tail.

Invariant: what an earlier attempt has written is not taken for progress of this one. The trainer
may replace `metrics.jsonl` at its start, by a copy without the steps that it will take again.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_lite.launcher.tail import Tail

_HEALING = b"Receiving the state of another replica"
_HEALED = b"Replicas that take part from sample"


class Progress:
    """Of one attempt, from its start on."""

    def __init__(self, metrics: Path, leader_log: Path) -> None:
        """Begin with what is written from now on: `metrics` is the metrics.jsonl of the replica,
        `leader_log` what its rank 0 prints."""
        self._metrics, self._log = Tail(metrics), Tail(leader_log)
        self.is_healing = False
        """Whether the state of another replica is being received."""
        self.record: Mapping[str, Any] | None = None
        """The newest step that this attempt has taken."""

    def look(self) -> None:
        """Read what was written since."""
        for line in self._log.lines():
            if _HEALING in line:
                self.is_healing = True
            elif _HEALED in line:
                self.is_healing = False
        for line in self._metrics.lines():
            with suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict) and "loss" in values and "event" not in values:
                    self.record, self.is_healing = values, False
