"""What is told of a run: one `StepRecord` a step, and `Event`s between them.

Layer: imports nothing of the project. A record is plain data that is on the host already, so a
sink never makes the host wait for the device. As JSON it is always well-formed: a number that is
not finite becomes null.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from time import time as unix_time
from typing import Any

_NOT_DRAWN = frozenset({"step", "time"})
"""The axes of curves."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of training. All values are global unless they say otherwise."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean over the step's target tokens, in nats."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Tokens seen since the start of training, this step's included."""
    num_target_tokens: int
    """Tokens of this step that count in its loss."""
    tokens_per_second: float
    """Of this step."""
    mfu: float | None
    """Share of the devices' peak that the model's arithmetic used, 0 to 1; None where the peak
    is not known."""
    memory_gib: float
    """Peak of this rank."""
    step_time_s: float
    """From the start of the step to its end: data, computation, save and garbage collection;
    validation and metrics are not in it."""
    data_time_s: float
    """Waiting for microbatches."""
    checkpoint_stall_s: float
    """Held up by a save."""
    gc_time_s: float
    """Collecting garbage."""
    num_replicas: int
    """Replicas that took part."""
    goodput: float | None = None
    """Share of the wall time since the run's first start that went into steps which were committed
    and are kept, 0 to 1; None of ranks that keep no books."""
    router_load: Mapping[str, float] | None = None
    """By router of a mixture of experts: the tokens of its busiest expert, as a multiple of a fair
    share; 1 is even."""
    idle_experts: int | None = None
    """Experts that no token of the step chose, over all routers."""
    skipped: bool = False
    """True when the step was refused for its loss or gradient, so that no weight changed."""
    time: float = field(default_factory=unix_time)
    """When the step ended: Unix time, in seconds."""

    def values(self) -> dict[str, Any]:
        """The fields in their order, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def to_json(self) -> str:
        """One line, without the line end."""
        return _json_line(self.values())


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happens beside the steps: "validation", "skip", "resume", ..."""

    name: str
    step: int
    """The last step that had ended."""
    values: Mapping[str, Any]
    """What there is to tell, in types that JSON has. May not contain "event", "step" or "time"."""
    time: float = field(default_factory=unix_time)
    """When it happened: Unix time, in seconds."""

    def __post_init__(self) -> None:
        taken = {"event", "step", "time"} & self.values.keys()
        if taken:
            raise ValueError(f"Event {self.name!r} has values named {sorted(taken)}; rename them.")

    def to_json(self) -> str:
        """One line, without the line end."""
        return _json_line({"event": self.name, "step": self.step, "time": self.time, **self.values})


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of `values` that can be drawn over the steps, one level down too, as `NAME/INNER`,
    without the step and the time."""
    inner = {
        f"{name}/{key}": value
        for name, several in values.items()
        if isinstance(several, Mapping)
        for key, value in several.items()
    }
    return {
        name: float(value)
        for name, value in {**values, **inner}.items()
        if isinstance(value, bool | int | float) and name not in _NOT_DRAWN
    }


def _json_line(values: Mapping[str, Any]) -> str:
    return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    """`value` with null for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
