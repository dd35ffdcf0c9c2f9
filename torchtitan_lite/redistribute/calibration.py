"""Fits the figures of `Costs` to a machine: exchanges and collectives are timed in the world that
runs, and the model's coefficients are those that predict them best. Layer: above legs.

The model is linear in seconds per round, message, piece and byte. Of an exchange the busiest holder
counts, and which that is depends on the figures; so fit and choice take turns.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_lite.extras import require
from torchtitan_lite.redistribute.calibration_steps import SHAPES, designed
from torchtitan_lite.redistribute.collective import Collective
from torchtitan_lite.redistribute.cost import Costs, Link, default_costs, loads_of, share_of_all
from torchtitan_lite.redistribute.joint import move
from torchtitan_lite.redistribute.legs import run
from torchtitan_lite.redistribute.means import Means
from torchtitan_lite.redistribute.plan import Plan

Step = Plan | Collective
"""What is timed: an exchange, or a collective of the backend."""

_COEFFICIENTS = (
    ("round_s", ""),
    ("collective_s", ""),
    ("piece_s", ""),
    ("copy_bytes_per_s", ""),
    *(
        (link, name)
        for link in ("within", "between", "collective_within")
        for name in ("latency_s", "bytes_per_s")
    ),
)
"""What is fitted: fields of Costs, and of its links."""
_ALTERNATIONS = 12
_FASTEST_BYTES_PER_S = 1e15
"""Stands for bytes that cost nothing."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A step that was timed."""

    name: str
    step: Step
    seconds: float
    """Of the slowest rank; the median of some turns."""


def calibrate(
    turns: int, device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES
) -> tuple[list[Sample], Costs]:
    """The designed steps as they were timed in this world, and the figures that fit them. Every
    rank of the world must call it, and all get the same."""
    world, on_node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    costs = default_costs(device.type).on_nodes_of(on_node if 0 < on_node < world else 0)
    if device.type == "cpu":
        costs = replace(costs, cores=float(os.cpu_count() or 1))
    samples = time_steps(designed(world, shapes), turns, device, Means(costs=costs))
    return samples, fit(samples, costs)


def time_steps(
    steps: Sequence[Step], turns: int, device: torch.device, means: Means
) -> list[Sample]:
    """Time each step `turns` times after a warm-up. Every rank of the world must call it with the
    same steps, and all get the same samples."""
    seconds = torch.tensor([_turns(_call(s, device, means), turns, device) for s in steps])
    seconds = seconds.to(device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return [
        Sample(name=_name(step), step=step, seconds=statistics.median(taken))
        for step, taken in zip(steps, seconds.tolist(), strict=True)
    ]


def _call(step: Step, device: torch.device, means: Means) -> Callable[[], object]:
    """What carries a step out on this rank."""
    rank = dist.get_rank()
    members = {*step.src.mesh.holders, *step.dst.mesh.holders}
    if rank not in members:
        return lambda: None
    local = torch.ones(step.src.local_shape(step.shape, rank), dtype=step.dtype, device=device)
    if isinstance(step, Collective):
        return lambda: run(step, local)
    out = torch.ones(step.local_shape(rank), dtype=step.dtype, device=device)
    return lambda: move([step], [local], [out], device, means)


def _turns(call: Callable[[], object], turns: int, device: torch.device) -> list[float]:
    """Seconds of each turn on this rank."""
    seconds = []
    # The first is the warm-up.
    for _ in range(turns + 1):
        dist.barrier()
        began_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return seconds[1:]


def _name(step: Step) -> str:
    kind = "+".join(step.rounds) if isinstance(step, Plan) else step.kind
    return f"{kind} {step.src} -> {step.dst}, {step.shape}"


def predicted_s(step: Step, costs: Costs) -> float:
    """What the figures say of a step."""
    if isinstance(step, Collective):
        return step.seconds(costs)
    return replace(step, costs=costs).predicted_s


def fit(samples: Sequence[Sample], default: Costs) -> Costs:
    """The figures with the least relative errors; those of `default` for what no sample has, and
    for the cores."""
    require("scipy", "calibration")
    from scipy.optimize import nnls

    costs = default
    measured = np.array([sample.seconds for sample in samples])
    told = measured
    for _ in range(_ALTERNATIONS):
        terms = np.array([_terms(sample.step, costs) for sample in samples])
        # By this weight twice too fast is as wrong as twice too slow.
        weight = 1 / np.sqrt(measured * told)
        found, _ = nnls(terms * weight[:, None], measured * weight)
        told = np.maximum(terms @ found, measured / 100)
        costs = _costs(found, np.abs(terms).sum(axis=0) > 0, default)
    return costs


def _terms(step: Step, costs: Costs) -> np.ndarray:
    """By coefficient, how often it is paid in a step; by `costs` it is told who is busiest."""
    units = _units(costs)
    if isinstance(step, Collective):
        return np.array([step.seconds(unit) for unit in units])
    share = share_of_all(step.exchange, costs)
    terms = np.zeros(len(units))
    for loads in loads_of(step.exchange, step.dtype.itemsize):
        seconds = [costs.seconds(load) for load in loads]
        by_load = np.array([[unit.seconds(load) for unit in units] for load in loads])
        in_turns = share * sum(seconds) > max(seconds)
        terms += share * by_load.sum(axis=0) if in_turns else by_load[np.argmax(seconds)]
    return terms


def _units(costs: Costs) -> list[Costs]:
    """For each coefficient, figures by which nothing else costs anything, and it a second."""
    zero = {
        place: Link(latency_s=0.0, bytes_per_s=np.inf) if name else _free(place)
        for place, name in _COEFFICIENTS
    }
    free = replace(costs, **zero)
    return [_with(free, place, name, 1.0) for place, name in _COEFFICIENTS]


def _free(name: str) -> float:
    return np.inf if name.endswith("bytes_per_s") else 0.0


def _with(costs: Costs, place: str, name: str, figure: float) -> Costs:
    """`costs` with another figure, that of a link where there is a `name`."""
    return replace(
        costs, **{place: replace(getattr(costs, place), **{name: figure}) if name else figure}
    )


def _costs(found: np.ndarray, is_known: Iterable[bool], default: Costs) -> Costs:
    """The figures that coefficients stand for."""
    costs = default
    for (place, name), value, known in zip(_COEFFICIENTS, found.tolist(), is_known, strict=True):
        if known:
            is_rate = (name or place).endswith("bytes_per_s")
            figure = 1 / max(value, 1 / _FASTEST_BYTES_PER_S) if is_rate else value
            costs = _with(costs, place, name, figure)
    return costs


def share_within(samples: Sequence[Sample], costs: Costs, factor: float = 2.0) -> float:
    """Of the predictions, how many are at most `factor` too great or too small."""
    ratios = [predicted_s(sample.step, costs) / sample.seconds for sample in samples]
    return sum(1 / factor <= ratio <= factor for ratio in ratios) / len(ratios)


def share_misordered(samples: Sequence[Sample], costs: Costs, factor: float = 1.5) -> float:
    """Of the pairs whose measured times differ by more than `factor`, how many are predicted in the
    other order."""
    pairs = wrong = 0
    both = sorted((sample.seconds, predicted_s(sample.step, costs)) for sample in samples)
    for number, (fast_s, fast_told_s) in enumerate(both):
        for slow_s, slow_told_s in both[number + 1 :]:
            if slow_s > factor * fast_s:
                pairs += 1
                wrong += slow_told_s <= fast_told_s
    return wrong / pairs if pairs else 0.0
