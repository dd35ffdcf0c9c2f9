"""The records of a run: one `StepRecord` per step, and `Event`s between them.

A record is plain data that is already on the host, so a sink never makes the host wait for the
device. Its JSON is always valid: a number that is not finite becomes null.
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
    """One step of training. All values are global unless stated otherwise."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean over the step's target tokens, in nats."""
    grad_norm: float
    """Gradient norm before clipping."""
    lr: float
    tokens: int
    """Tokens since the start of training, including this step."""
    num_target_tokens: int
    """Tokens of this step that contribute to the loss."""
    tokens_per_second: float
    """Throughput in this step."""
    mfu: float | None
    """Fraction of the devices' peak that the model's arithmetic used, 0 to 1; None if the peak
    is unknown."""
    memory_gib: float
    """Peak memory of this rank."""
    step_time_s: float
    """From the start of the step to its end: data, computation, save and garbage collection;
    without validation and metrics."""
    data_time_s: float
    """Time waiting for microbatches."""
    checkpoint_stall_s: float
    """Time blocked by a save."""
    gc_time_s: float
    """Time of garbage collection."""
    num_replicas: int
    """Participating replicas."""
    goodput: float | None = None
    """Fraction of the wall time since the run's first start that was spent in steps that were
    committed and kept, 0 to 1; None on ranks without time accounting."""
    router_load: Mapping[str, float] | None = None
    """Tokens of the busiest expert as a multiple of the mean, by MoE router; 1 is balanced."""
    idle_experts: int | None = None
    """Experts without tokens in this step, over all routers."""
    skipped: bool = False
    """Whether the step was skipped for its loss or gradient, so that no weight changed."""
    time: float = field(default_factory=unix_time)
    """End of the step: Unix time, in seconds."""

    def values(self) -> dict[str, Any]:
        """Return the fields in their order, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_json(self) -> str:
        """Return one line, without the line end."""
        return _json_line(self.values())


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event between steps: "validation", "skip", "resume", ..."""

    name: str
    step: int
    """Last completed step."""
    values: Mapping[str, Any]
    """Details, in JSON types. Must not contain "event", "step" or "time"."""
    time: float = field(default_factory=unix_time)
    """Time of the event: Unix time, in seconds."""

    def __post_init__(self) -> None:
        reserved = {"event", "step", "time"} & self.values.keys()
        if reserved:
            raise ValueError(
                f"Event {self.name!r} has values named {sorted(reserved)}; rename them."
            )

    def to_json(self) -> str:
        """Return one line, without the line end."""
        return _json_line({"event": self.name, "step": self.step, "time": self.time, **self.values})


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the `values` that can be plotted over steps, including one nested level as
    `NAME/INNER`, without the step and the time."""
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
    """Return `value` with null for every number that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def mfu(
    flops_per_token: float, tokens_per_second: float, peak_flops: float | None, num_devices: int
) -> float | None:
    """Return the model FLOPs utilization, 0 to 1: the fraction of the devices' peak that the
    model's own arithmetic uses, without recomputation (Chowdhery et al. 2022, appendix B).

    `tokens_per_second` is the total of all devices, `peak_flops` (FLOP/s) that of one. None if that
    is None.
    """
    if peak_flops is None:
        return None
    return flops_per_token * tokens_per_second / (peak_flops * num_devices)
