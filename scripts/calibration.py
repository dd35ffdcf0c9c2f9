"""Calibration of `Costs` to a machine.

Exchanges are timed on the running ranks, and the figures are those that predict the
times best. The model is linear in seconds per round, message, piece and byte. An exchange takes as
long as its busiest holder, which depends on the figures, so fitting and selection alternate.
"""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from torchtitan_lite.optional_dependencies import require
from torchtitan_lite.redistribute.cost import (
    Costs,
    ExchangeOptions,
    Link,
    core_share,
    default_costs,
    round_loads,
)
from torchtitan_lite.redistribute.execute import execute_exchange
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.placements import HolderMesh
from torchtitan_lite.redistribute.plan import Plan, plan

SHAPES = ((48, 80), (250, 256), (1000, 1024), (2048, 2048))
"""Sizes from 15 KB to 16 MB in float32."""

_SEED = 0

_R, _P, _S0, _S1 = Replicate(), Partial(), Shard(0), Shard(1)

_COEFFICIENTS = (
    ("round_s", ""),
    ("piece_s", ""),
    ("copy_bytes_per_s", ""),
    *((link, name) for link in ("within", "between") for name in ("latency_s", "bytes_per_s")),
)
"""Fitted fields of Costs, and of its links."""

_ALTERNATIONS = 12

_FASTEST_BYTES_PER_S = 1e15
"""Bandwidth of free bytes."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A timed step."""

    name: str
    step: Plan
    seconds: float
    """Seconds of the slowest rank; the median of some turns."""


def calibrate(
    turns: int, device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES
) -> tuple[list[TimedStep], Costs]:
    """Time the designed steps in this world and fit the costs. Every rank of the world must call
    it, and all get the same."""
    world, on_node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    costs = default_costs(device.type).with_ranks_per_node(on_node if 0 < on_node < world else 0)
    if device.type == "cpu":
        costs = replace(costs, cores=float(os.cpu_count() or 1))
    samples = time_steps(
        calibration_steps(world, shapes), turns, device, ExchangeOptions(costs=costs)
    )
    return samples, fit(samples, costs)


def time_steps(
    steps: Sequence[Plan], turns: int, device: torch.device, options: ExchangeOptions
) -> list[TimedStep]:
    """Time each step `turns` times after a warm-up. Every rank of the world must call it with the
    same steps, and all get the same samples."""
    seconds = torch.tensor([_turns(_call(s, device, options), turns, device) for s in steps])
    seconds = seconds.to(device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return [
        TimedStep(name=_name(step), step=step, seconds=statistics.median(taken))
        for step, taken in zip(steps, seconds.tolist(), strict=True)
    ]


def fit(samples: Sequence[TimedStep], default: Costs) -> Costs:
    """Return the costs with the least relative errors; those of `default` for fields without
    samples, and for the cores."""
    require("scipy", "scripts.calibrate")
    from scipy.optimize import nnls

    costs = default
    measured = np.array([sample.seconds for sample in samples])
    predicted = measured
    for _ in range(_ALTERNATIONS):
        terms = np.array([_terms(sample.step, costs) for sample in samples])
        # By this weight twice too fast is as wrong as twice too slow.
        weight = 1 / np.sqrt(measured * predicted)
        found, _ = nnls(terms * weight[:, None], measured * weight)
        predicted = np.maximum(terms @ found, measured / 100)
        costs = _costs(found, np.abs(terms).sum(axis=0) > 0, default)
    return costs


def predicted_s(step: Plan, costs: Costs) -> float:
    """Predict the time of a step."""
    return replace(step, costs=costs).predicted_s


def fraction_within(samples: Sequence[TimedStep], costs: Costs, factor: float = 2.0) -> float:
    """Return the fraction of predictions within `factor` of the measured time."""
    ratios = [predicted_s(sample.step, costs) / sample.seconds for sample in samples]
    return sum(1 / factor <= ratio <= factor for ratio in ratios) / len(ratios)


def fraction_misordered(samples: Sequence[TimedStep], costs: Costs, factor: float = 1.5) -> float:
    """Return the fraction of pairs whose measured times differ by more than `factor` that are
    predicted in the other order."""
    pairs = wrong = 0
    both = sorted((sample.seconds, predicted_s(sample.step, costs)) for sample in samples)
    for number, (fast_s, fast_told_s) in enumerate(both):
        for slow_s, slow_told_s in both[number + 1 :]:
            if slow_s > factor * fast_s:
                pairs += 1
                wrong += slow_told_s <= fast_told_s
    return wrong / pairs if pairs else 0.0


def calibration_steps(num_ranks: int, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Plan]:
    """Return the calibration steps: few and many messages, pieces, rounds and bytes, local copies
    alone, on at least 2 ranks. Deterministic."""
    return list(_exchanges(num_ranks, shapes))


def held_out_steps(num_ranks: int, count: int) -> list[Plan]:
    """Return exchanges between random layouts of random shapes, of 16 KB to 16 MB."""
    choice, found = random.Random(_SEED), []
    meshes = _meshes(num_ranks)
    while len(found) < count:
        mesh = choice.choice(meshes)
        src = Layout(mesh, [choice.choice((_R, _S0, _S1, _P)) for _ in mesh.shape])
        dst = Layout(mesh, [choice.choice((_R, _S0, _S1)) for _ in mesh.shape])
        size, ratio = 2 ** choice.uniform(12, 22), 2 ** choice.uniform(-3, 3)
        shape = int(math.sqrt(size * ratio)), int(math.sqrt(size / ratio))
        step = _exchange(src, dst, shape)
        if not step.is_noop:
            found.append(step)
    return found


def _call(step: Plan, device: torch.device, options: ExchangeOptions) -> Callable[[], object]:
    """Return a function that executes a step on this rank."""
    rank = dist.get_rank()
    members = {*step.src.mesh.holders, *step.dst.mesh.holders}
    if rank not in members:
        return lambda: None
    local = torch.ones(step.src.local_shape(step.shape, rank), dtype=step.dtype, device=device)
    out = torch.ones(step.local_shape(rank), dtype=step.dtype, device=device)
    return lambda: execute_exchange([step], [local], [out], device, options)


def _turns(call: Callable[[], object], turns: int, device: torch.device) -> list[float]:
    """Return the seconds of each turn on this rank."""
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


def _name(step: Plan) -> str:
    return f"{'+'.join(step.rounds)} {step.src} -> {step.dst}, {step.shape}"


def _terms(step: Plan, costs: Costs) -> np.ndarray:
    """Return how often each coefficient is paid in a step; `costs` determine the busiest holder."""
    units = _units(costs)
    share = core_share(step.exchange, costs)
    terms = np.zeros(len(units))
    for loads in round_loads(step.exchange, step.dtype.itemsize):
        seconds = [costs.seconds(load) for load in loads]
        by_load = np.array([[unit.seconds(load) for unit in units] for load in loads])
        in_turns = share * sum(seconds) > max(seconds)
        terms += share * by_load.sum(axis=0) if in_turns else by_load[np.argmax(seconds)]
    return terms


def _units(costs: Costs) -> list[Costs]:
    """Return, per coefficient, costs in which everything else is free."""
    zero = {
        place: Link(latency_s=0.0, bytes_per_s=np.inf) if name else _free(place)
        for place, name in _COEFFICIENTS
    }
    free = replace(costs, **zero)
    return [_with(free, place, name, 1.0) for place, name in _COEFFICIENTS]


def _free(name: str) -> float:
    return np.inf if name.endswith("bytes_per_s") else 0.0


def _with(costs: Costs, place: str, name: str, figure: float) -> Costs:
    """Return `costs` with another value of a field, that of a link if there is a `name`."""
    return replace(
        costs, **{place: replace(getattr(costs, place), **{name: figure}) if name else figure}
    )


def _costs(found: np.ndarray, is_known: Iterable[bool], default: Costs) -> Costs:
    """Return the costs of coefficients."""
    costs = default
    for (place, name), value, known in zip(_COEFFICIENTS, found.tolist(), is_known, strict=True):
        if known:
            is_rate = (name or place).endswith("bytes_per_s")
            figure = 1 / max(value, 1 / _FASTEST_BYTES_PER_S) if is_rate else value
            costs = _with(costs, place, name, figure)
    return costs


def _meshes(num_ranks: int) -> list[HolderMesh]:
    """Return all ranks in a row, and in two rows if they are even."""
    meshes = [HolderMesh.ranks(num_ranks)]
    if num_ranks > 2 and num_ranks % 2 == 0:
        meshes.append(HolderMesh.ranks(num_ranks // 2, 2))
    return meshes


def _exchanges(num_ranks: int, shapes: Sequence[tuple[int, int]]) -> Iterator[Plan]:
    half = num_ranks // 2
    row, one = HolderMesh.ranks(num_ranks), HolderMesh.ranks(1)
    first, second = HolderMesh.ranks(half), HolderMesh.ranks(half, first=half)
    pairs = [
        *((Layout(row, [a]), Layout(row, [b])) for a in (_S0, _S1, _R, _P) for b in (_S0, _S1, _R)),
        (Layout(one, [_R]), Layout(row, [_R])),
        (Layout(one, [_R]), Layout(row, [_S0])),
        (Layout(row, [_S0]), Layout(one, [_R])),
        *((Layout(first, [_S0]), Layout(mesh, [_S0])) for mesh in (row, second)),
        (Layout(first, [_S0]), Layout(second, [_S1])),
    ]
    for two in _meshes(num_ranks)[1:]:
        pairs += [
            (Layout(two, [_S0, _R]), Layout(two, [_R, _S0])),
            (Layout(two, [_S0, _S1]), Layout(two, [_R, _R])),
            (Layout(two, [_R, _S1]), Layout(two, [_S0, _S0])),
            (Layout(two, [_P, _S0]), Layout(two, [_S0, _S0])),
        ]
    for shape in shapes:
        for src, dst in pairs:
            if src != dst:
                yield _exchange(src, dst, shape)


def _exchange(src: Layout, dst: Layout, shape: tuple[int, int]) -> Plan:
    return plan(src, dst, shape, torch.float32)
