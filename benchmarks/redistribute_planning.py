"""The time of planning.

Planning is timed in this process, without ranks or tensors. Cold means that every cache of the
package is empty and layouts have computed nothing. A plan is timed with the transfers of one rank,
as a rank needs it.

There is no peer: `floor` is the goal's absolute value, and the ratio may be at most 1.
"""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from benchmarks.harness import Comparison, Result
from benchmarks.state_dicts import STATES, fsdp, fsdp_tp
from torchtitan_lite.redistribute import HolderMesh, Layout, plan
from torchtitan_lite.redistribute.cost import CPU, CUDA, Costs

_SEED = 0
_CACHED_CALLS = 1000
_RANK = 3

Pair = tuple[Layout, Layout, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class PlannerCase:
    """Number of random pairs, and of rounds of the other measurements."""

    pairs: int
    rounds: int
    small: bool = False
    """Skip the slowest measurement."""


def measure_planner(case: PlannerCase) -> Iterator[Result]:
    """Measure without garbage collection, which the trainer runs between steps: a collection over
    all objects of torch takes a tenth of a second."""
    gc.disable()
    try:
        yield from _rows(case)
    finally:
        gc.enable()


def _rows(case: PlannerCase) -> Iterator[Result]:
    few, many = (0.5, 10.0), (1.0, 10.0)
    for shape, costs, goals_ms in (
        ((2, 2, 2), CPU, few),
        ((4, 4, 4), CPU, few),
        ((4,) * 5, CPU, many),
        ((4, 4, 4), CUDA, few),
        ((4,) * 5, CUDA, many),
        ((4, 4, 4), CUDA.with_ranks_per_node(8), few),
        ((4, 4, 16), CUDA.with_ranks_per_node(8), few),
        ((4,) * 5, CPU.with_ranks_per_node(8), many),
    ):
        seconds = _random_pairs(shape, costs, case.pairs)
        where = f"{'CUDA' if costs.within == CUDA.within else 'CPU'} costs"
        where += f", nodes of {costs.ranks_per_node}" if costs.ranks_per_node else ""
        name = f"random layouts on {' x '.join(map(str, shape))} ranks, {where}, cold"
        for what, value, goal in zip(
            ("median", "worst"), (statistics.median(seconds), max(seconds)), goals_ms, strict=True
        ):
            yield _row(name, f"{what} of {len(seconds)} plans and parts", value * 1e3, "ms", goal)
    state_ms = _cold_seconds(_state_pairs, case.rounds) * 1e3
    yield _row(
        "state dict of 101 tensors on 4 x 2 ranks, cold", "plans and parts", state_ms, "ms", 3
    )
    few_ms = _cold_seconds(partial(_many_pairs, 10), case.rounds) * 1e3
    name = "1024 tensors on 8 x 32 x 8 ranks, cold"
    yield _row(f"{name}, 10 shapes", "plans and parts", few_ms, "ms", 20)
    if not case.small:
        all_s = _cold_seconds(partial(_many_pairs, 1024), min(case.rounds, 3))
        yield _row(f"{name}, 1024 shapes", "plans and parts", all_s, "s", 1.5)
    yield _row("a plan that was made before", "plan", _cached_seconds(case.rounds) * 1e6, "us", 2)


def _row(case: str, metric: str, ours: float, unit: str, goal: float) -> Result:
    comparison = Comparison(case, metric)
    comparison.note(f"{ours:.3g} {unit}, goal {goal:g}")
    return comparison.ratio(metric, unit, ours, floor=goal, goal=1.0)


def _clear_caches() -> None:
    """Clear every cache of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan_lite.redistribute"):
            for holder in (module, *(v for v in vars(module).values() if isinstance(v, type))):
                for value in list(vars(holder).values()):
                    clear = getattr(getattr(value, "__func__", value), "cache_clear", None)
                    if clear is not None:
                        clear()


def _random_pairs(mesh_shape: Sequence[int], costs: Costs, count: int) -> list[float]:
    """Seconds of each plan with the transfers of one rank, for random layouts of a tensor."""
    choice = random.Random(_SEED)
    seconds = []
    for _ in range(count):
        mesh = HolderMesh.ranks(*mesh_shape)
        pair = _layout(choice, mesh, True), _layout(choice, mesh, False), _shape(choice)
        _clear_caches()
        began_s = time.perf_counter()
        _plan_and_transfers(pair, choice.choice(mesh.holders), costs)
        seconds.append(time.perf_counter() - began_s)
    return seconds


def _layout(choice: random.Random, mesh: HolderMesh, partial_sums: bool) -> Layout:
    """A random placement on each axis, with shards of a dim in random order."""
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(2)]
    if partial_sums:
        kinds.append(Partial())
    placements = [choice.choice(kinds) for _ in mesh.shape]
    orders = {}
    for dim in range(3):
        axes = [axis for axis, placement in enumerate(placements) if placement == Shard(dim)]
        if axes:
            orders[dim] = choice.sample(axes, len(axes))
    return Layout(mesh, placements, orders)


def _shape(choice: random.Random) -> tuple[int, ...]:
    return tuple(choice.randint(1, 4096) for _ in range(3))


def _state_pairs() -> list[Pair]:
    mesh = HolderMesh.ranks(4, 2)
    return [(fsdp(n, mesh), fsdp_tp(n, mesh), shape) for n, shape in STATES["llama"].items()]


def _many_pairs(num_shapes: int) -> list[Pair]:
    """1,024 tensors from replicated FSDP x TP to FSDP over all ranks."""
    mesh = HolderMesh.ranks(8, 32, 8)
    src = Layout(mesh, [Replicate(), Shard(0), Shard(1)])
    dst = Layout(mesh, [Shard(0), Shard(0), Shard(0)])
    return [(src, dst, (4096 + 8 * (n % num_shapes), 4096)) for n in range(1024)]


def _cold_seconds(make: Callable[[], list[Pair]], rounds: int) -> float:
    """Median seconds to plan all pairs and the transfers of one rank."""
    seconds = []
    for _ in range(rounds):
        pairs = make()
        _clear_caches()
        began_s = time.perf_counter()
        for pair in pairs:
            _plan_and_transfers(pair, _RANK)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _cached_seconds(rounds: int) -> float:
    """Median seconds to look up a cached plan."""
    src, dst, shape = _state_pairs()[0]
    seconds = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        for _ in range(_CACHED_CALLS):
            plan(src, dst, shape, torch.float32)
        seconds.append((time.perf_counter() - began_s) / _CACHED_CALLS)
    return statistics.median(seconds[1:])


def _plan_and_transfers(pair: Pair, rank: object, costs: Costs = CPU) -> None:
    src, dst, shape = pair
    plan(src, dst, shape, torch.float32, costs=costs).transfers(rank)
