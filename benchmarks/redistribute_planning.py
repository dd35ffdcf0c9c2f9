"""The time of planning.

Planning is timed in this process, without ranks or tensors. Cold means that every cache of the
package is empty and layouts have computed nothing. A plan is timed with the transfers of one rank,
as a rank needs it, each the median of three times. `floor` is the goal's absolute value, and the
ratio may be at most 1.

With nodes, data is forwarded in a second round, for which twice the time of the same plans without
nodes is allowed. The random plan with the most transfers has tens of thousands for one rank: a list
of them alone, of values that are known already, takes a large part of the 10 ms that are the goal
for any other plan, so plans with so many are compared with the list instead.
"""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from benchmarks.harness import Comparison, Result
from benchmarks.state_dicts import STATES, fsdp, fsdp_tp
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, plan
from torchtitan_lite.distributed.redistribute.planning.cost import CPU, CUDA, Costs
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.transfers import RoundTransfers, Transfer

_SEED = 0
_CACHED_CALLS = 1000
_REPEATS = 3
_LISTING_GOAL = 5.0
_NODES_GOAL = 2.0
_MANY_TRANSFERS = 10_000
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
    for shape, base, per_node, goals_ms in (
        ((2, 2, 2), CPU, 0, few),
        ((4, 4, 4), CPU, 0, few),
        ((4,) * 5, CPU, 0, many),
        ((4, 4, 4), CUDA, 0, few),
        ((4,) * 5, CUDA, 0, many),
        ((4, 4, 4), CUDA, 8, few),
        ((4, 4, 16), CUDA, 8, few),
        ((4,) * 5, CPU, 8, many),
    ):
        costs = base.with_ranks_per_node(per_node) if per_node else base
        timed = _random_pairs(shape, costs, case.pairs)
        where = f"{'CUDA' if base is CUDA else 'CPU'} costs"
        where += f", nodes of {per_node}" if per_node else ""
        name = f"random layouts on {' x '.join(map(str, shape))} ranks, {where}, cold"
        median_s = statistics.median(timing.seconds for timing in timed)
        usual_s = [timing.seconds for timing in timed if timing.transfers <= _MANY_TRANSFERS]
        what = f"of {len(timed)} plans and parts"
        if per_node:
            without = _random_pairs(shape, base, case.pairs)
            without_s = statistics.median(timing.seconds for timing in without)
            yield _nodes_row(name, f"median {what}, and without nodes", median_s, without_s)
        else:
            yield _row(name, f"median {what}", median_s * 1e3, "ms", goals_ms[0])
        what = f"of {len(usual_s)} plans and parts"
        yield _row(name, f"worst {what}", max(usual_s) * 1e3, "ms", goals_ms[1])
        for timing in timed:
            if timing.transfers > _MANY_TRANSFERS:
                yield _listing_row(name, timing)
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


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """A plan with the transfers of one rank."""

    seconds: float
    transfers: int
    listing_s: float
    """Time of a list of these transfers, of known values."""


def _nodes_row(case: str, metric: str, ours_s: float, without_s: float) -> Result:
    comparison = Comparison(case, metric)
    comparison.note(f"{ours_s * 1e3:.3g} ms, without nodes {without_s * 1e3:.3g} ms")
    return comparison.ratio(metric, "s", ours_s, floor=without_s, goal=_NODES_GOAL)


def _listing_row(case: str, timed: _Timed) -> Result:
    comparison = Comparison(case, "many transfers")
    comparison.note(f"{timed.transfers} transfers, listed in {timed.listing_s * 1e3:.3g} ms")
    metric = f"plan with {timed.transfers} transfers, against a list of them"
    return comparison.ratio(metric, "s", timed.seconds, floor=timed.listing_s, goal=_LISTING_GOAL)


def _clear_caches() -> None:
    """Clear every cache of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan_lite.distributed.redistribute"):
            for holder in (module, *(v for v in vars(module).values() if isinstance(v, type))):
                for value in list(vars(holder).values()):
                    clear = getattr(getattr(value, "__func__", value), "cache_clear", None)
                    if clear is not None:
                        clear()


def _random_pairs(mesh_shape: Sequence[int], costs: Costs, count: int) -> list[_Timed]:
    """Time plans for random layouts of a tensor, with the transfers of a random rank."""
    timed = []
    for index in range(count):
        seconds, parts = [], ()
        for _ in range(_REPEATS):
            # Made again each time, because layouts keep what they have computed.
            choice = random.Random(f"{_SEED} {index}")
            mesh = HolderMesh.ranks(*mesh_shape)
            src, dst = _layout(choice, mesh, True), _layout(choice, mesh, False)
            shape, rank = _shape(choice), choice.choice(mesh.holders)
            _clear_caches()
            began_s = time.perf_counter()
            parts = _plan_and_transfers((src, dst, shape), rank, costs)
            seconds.append(time.perf_counter() - began_s)
        listed = [[tuple(transfer) for transfer in pieces] for part in parts for pieces in part]
        listing_s = statistics.median(_listing_seconds(listed) for _ in range(_REPEATS))
        timed.append(
            _Timed(
                seconds=statistics.median(seconds),
                transfers=sum(map(len, listed)),
                listing_s=listing_s,
            )
        )
    return timed


def _listing_seconds(listed: list[list[tuple[Any, ...]]]) -> float:
    """Seconds of lists of transfers of known values, made in the fastest way."""
    new = tuple.__new__
    began_s = time.perf_counter()
    _ = [[new(Transfer, transfer) for transfer in pieces] for pieces in listed]
    return time.perf_counter() - began_s


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


def _plan_and_transfers(pair: Pair, rank: Holder, costs: Costs = CPU) -> tuple[RoundTransfers, ...]:
    src, dst, shape = pair
    return plan(src, dst, shape, torch.float32, costs=costs).transfers(rank)
