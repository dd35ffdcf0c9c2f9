"""Moves state out of holders that are no processes: files, or the memory of processes that ended.

A rank acts for each of them: it opens what the holder has, and gives it in the holder's place.
Layer: above joint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.execution import Execution
from torchtitan_lite.redistribute.holder_mesh import Holder, HolderMesh
from torchtitan_lite.redistribute.joint import group_of
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.means import DEFAULT_MEANS, Means
from torchtitan_lite.redistribute.plan import plan
from torchtitan_lite.redistribute.program import Task
from torchtitan_lite.redistribute.words import word_bytes


@dataclass(frozen=True)
class Taking:
    """A tensor that is taken from holders which are no ranks."""

    src: Layout
    dst: Layout
    """On ranks."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    actors: Mapping[Holder, int]
    """The rank that acts for each holder of `src`."""

    @property
    def stays(self) -> bool:
        """Whether each rank acts for one holder, whose part is its own part of `dst`."""
        return _stays(self.src, self.dst, tuple(self.actors[h] for h in self.src.mesh.holders))

    @property
    def dst_ranks(self) -> list[int]:
        return [holder for holder in self.dst.mesh.holders if isinstance(holder, int)]

    def __post_init__(self) -> None:
        missing = [holder for holder in self.src.mesh.holders if holder not in self.actors]
        if missing:
            raise LayoutError(f"No rank acts for {missing[0]!r} of {self.src}.")
        if self.src.reduce_op or self.dst.reduce_op:
            raise LayoutError(f"Contributions cannot be taken out of files: {self.src}.")


@lru_cache(maxsize=1024)
def _stays(src: Layout, dst: Layout, acting: tuple[int, ...]) -> bool:
    if len(set(acting)) < len(acting) or src.mesh.shape != dst.mesh.shape:
        return False
    # What files call an axis says nothing.
    mesh = HolderMesh(src.mesh.shape, acting, dst.mesh.axes)
    return Layout(mesh, src.placements, src.shard_order) == dst


def choose_actors(
    src: Layout,
    ranks: Sequence[int],
    number: int,
    reach: Mapping[Holder, Sequence[int]] | None = None,
) -> dict[Holder, int]:
    """A rank for each holder of a tensor, the k-th of `ranks` for the k-th where there are as many;
    else they are spread evenly, for each `number` of a tensor beginning elsewhere, so that many
    tensors keep all ranks busy. `reach` tells who can open a holder, where not all can.

    Raises LayoutError for a holder that nobody can open.
    """
    holders = src.mesh.holders
    actors: dict[Holder, int] = {}
    for place, holder in enumerate(holders):
        position = place * len(ranks) // len(holders)
        if len(holders) < len(ranks):
            position += number % (len(ranks) // len(holders))
        wanted = ranks[position]
        able = ranks if reach is None else reach.get(holder, ())
        if not able:
            raise LayoutError(f"{holder!r} of {src} is out of reach of all ranks.")
        actors[holder] = wanted if wanted in able else able[(place + number) % len(able)]
    return actors


@torch.no_grad()
def take(
    takings: Sequence[Taking],
    given: Sequence[Mapping[Holder, torch.Tensor]],
    outs: Sequence[torch.Tensor | None],
    means: Means = DEFAULT_MEANS,
) -> None:
    """Fill `outs`, this rank's parts of the destinations, in one exchange: all on the CPU, and
    contiguous. `given` has, by taking, what the holders hold that this rank acts for.

    Every rank must call it, with the same `takings`. Without a process group this process is alone,
    and rank 0.
    """
    if not takings:
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    cpu = torch.device("cpu")
    width = word_bytes(taking.dtype for taking in takings)
    near: list[tuple[Task, int]] = []
    far: list[tuple[Task, int]] = []
    ranks: set[int] = set()
    for number, taking in enumerate(takings):
        tasks, moves = _tasks(taking, rank, width, means)
        (far if moves else near).extend((task, number) for task in tasks)
        if moves:
            ranks.update(taking.actors.values(), taking.dst_ranks)
    for some, takers in ((near, (rank,)), (far, tuple(sorted(ranks)))):
        if some and rank in takers:
            group = group_of(takers) if len(takers) > 1 else None
            Execution([task for task, _ in some], takers, group, cpu, means).run(
                [_given(task, given[number]) for task, number in some],
                [outs[number] for _, number in some],
            )


def _given(task: Task, parts: Mapping[Holder, torch.Tensor]) -> torch.Tensor | None:
    holders = task.actors or parts
    return next((parts[holder] for holder in holders if holder in parts), None)


def _tasks(taking: Taking, rank: int, width: int, means: Means) -> tuple[list[Task], bool]:
    """What this rank does for a tensor, and whether anything goes from one rank to another."""
    src, actors = taking.src, taking.actors
    acting = tuple(actors[holder] for holder in src.mesh.holders)
    if len(set(acting)) == len(acting):
        # Each acts for one at most: it is as if the ranks themselves held the tensor.
        live = src.held_by(acting)
        costs = means.costs_on(torch.device("cpu"))
        found = plan(live, taking.dst, taking.shape, taking.dtype, costs=costs, one_exchange=True)
        return [Task(found, rank, width)], found.moved_bytes > 0
    # To a file all ranks are equally near, so that no relay is asked for.
    found = plan(src, taking.dst, taking.shape, taking.dtype, one_exchange=True)
    turns: list[dict[Holder, Holder]] = []
    taken: dict[int, int] = {}
    for holder in src.mesh.holders:
        turn = taken.get(actors[holder], 0)
        taken[actors[holder]] = turn + 1
        if turn == len(turns):
            turns.append({})
        turns[turn][holder] = actors[holder]
    return [Task(found, rank, width, turn) for turn in turns], True
