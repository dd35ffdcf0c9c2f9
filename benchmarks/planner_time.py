"""How long planning takes, in one process: nothing is started, and no tensor is made.

Cold means that every cache of the package is empty, and that layouts have worked nothing out. Of a
plan one rank's part is timed with it, as a rank needs it. There is nothing to compare with: `floor`
is the goal's own absolute figure, and the ratio may be 1.
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

from benchmarks.agreement import Agreement
from benchmarks.rows import Row, compare
from benchmarks.state_dicts import STATES, fsdp, fsdp_tp
from torchtitan_lite.redistribute import HolderMesh, Layout, plan

_SEED = 0
_CACHED_CALLS = 1000
_RANK = 3

Pair = tuple[Layout, Layout, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class PlannerCase:
    """How many random pairs are planned, and how often each of the rest is."""

    pairs: int
    rounds: int
    small: bool = False
    """Leave out what takes long."""


def measure_planner(case: PlannerCase) -> Iterator[tuple[Row, Agreement]]:
    """All rows. Garbage is not collected meanwhile: to look through all objects of torch takes a
    tenth of a second, and the trainer does it between steps."""
    gc.disable()
    try:
        yield from _rows(case)
    finally:
        gc.enable()


def _rows(case: PlannerCase) -> Iterator[tuple[Row, Agreement]]:
    for shape, goals_ms in (((2, 2, 2), (0.5,)), ((4, 4, 4), (0.5,)), ((4,) * 5, (1.0, 10.0))):
        seconds = _random_pairs(shape, case.pairs)
        name = f"random layouts on {' x '.join(map(str, shape))} ranks, cold"
        for what, value, goal in zip(
            ("median", "worst"), (statistics.median(seconds), max(seconds)), goals_ms, strict=False
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


def _row(case: str, metric: str, ours: float, unit: str, goal: float) -> tuple[Row, Agreement]:
    agreement = Agreement(f"{case}: {metric}")
    agreement.note(f"{ours:.3g} {unit}, of which {goal:g} are the goal")
    row = compare(
        case=case, metric=metric, unit=unit, ours=ours, floor=goal, goal=1.0, comparable=True
    )
    return row, agreement


def forget() -> None:
    """Empty every cache of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan_lite.redistribute"):
            for holder in (module, *(v for v in vars(module).values() if isinstance(v, type))):
                for value in list(vars(holder).values()):
                    clear = getattr(getattr(value, "__func__", value), "cache_clear", None)
                    if clear is not None:
                        clear()


def _random_pairs(mesh_shape: Sequence[int], count: int) -> list[float]:
    """Seconds of each plan with one rank's part, for random layouts of a random tensor."""
    choice = random.Random(_SEED)
    seconds = []
    for _ in range(count):
        mesh = HolderMesh.ranks(*mesh_shape)
        pair = _layout(choice, mesh, True), _layout(choice, mesh, False), _shape(choice)
        forget()
        began_s = time.perf_counter()
        _plan_and_part(pair, choice.choice(mesh.holders))
        seconds.append(time.perf_counter() - began_s)
    return seconds


def _layout(choice: random.Random, mesh: HolderMesh, contributions: bool) -> Layout:
    """Any placement on each axis, and the cuts of a dim in any order."""
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(2)]
    if contributions:
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
    """1,024 tensors from FSDP x TP within copies to FSDP over all."""
    mesh = HolderMesh.ranks(8, 32, 8)
    src = Layout(mesh, [Replicate(), Shard(0), Shard(1)])
    dst = Layout(mesh, [Shard(0), Shard(0), Shard(0)])
    return [(src, dst, (4096 + 8 * (n % num_shapes), 4096)) for n in range(1024)]


def _cold_seconds(make: Callable[[], list[Pair]], rounds: int) -> float:
    """Median seconds to plan all pairs and one rank's parts."""
    seconds = []
    for _ in range(rounds):
        pairs = make()
        forget()
        began_s = time.perf_counter()
        for pair in pairs:
            _plan_and_part(pair, _RANK)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _cached_seconds(rounds: int) -> float:
    """Median seconds to be given a plan again."""
    src, dst, shape = _state_pairs()[0]
    seconds = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        for _ in range(_CACHED_CALLS):
            plan(src, dst, shape, torch.float32)
        seconds.append((time.perf_counter() - began_s) / _CACHED_CALLS)
    return statistics.median(seconds[1:])


def _plan_and_part(pair: Pair, rank: object) -> None:
    src, dst, shape = pair
    plan(src, dst, shape, torch.float32).transfers(rank)
