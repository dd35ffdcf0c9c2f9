"""Single collectives of the backend as edges between layouts, and the search over them.

Collectives have a lower startup cost than an exchange on some machines, and run as rings between
nodes. Each acts on one axis of the mesh, or on several as if they were one. The search is
Dijkstra's algorithm over the layouts of a mesh; the edges are collectives, splits without
communication, and from every layout the exchange straight to the destination. The direct exchange
bounds the search, which visits only cheaper layouts and gives the same result on every rank.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from torchtitan_lite.redistribute.cost import Costs
from torchtitan_lite.redistribute.layout import Layout

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]

_JOINED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
"""Dtypes that backends reduce: gloo does not know float8 and adds the bytes of bools, and no
backend multiplies complex numbers."""

_GATHERED = _JOINED | {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64}
"""Dtypes that they gather; single bytes are gathered as such."""

_MOST_AXES = 2
"""Maximum axes of one collective."""

_MOST_STATES = 24
"""Maximum layouts expanded. A way cheaper than an exchange has few steps."""


@dataclass(frozen=True)
class Collective:
    """A step of a plan."""

    kind: CollectiveKind
    src: Layout
    dst: Layout
    axes: tuple[int, ...]
    """Axes of the mesh, treated as one: the first varies slowest."""
    dim: int | None
    """The dim that is sharded or gathered; None for all_reduce."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Ranks per group."""
        return prod(self.src.mesh.shape[axis] for axis in self.axes)

    @property
    def op(self) -> str:
        """Reduction of partial values."""
        return self.src.reduce_op or "sum"

    @property
    def factor(self) -> float:
        """Factor of the result, if averages are reduced as sums."""
        mesh, placements = self.src.mesh, self.src.placements
        joined = self.axes if self.kind != "all_gather" else ()
        return 1 / prod(
            mesh.shape[axis]
            for axis in joined
            if isinstance(p := placements[axis], Partial) and p.reduce_op == "avg"
        )

    @property
    def padded_elements(self) -> int:
        """Elements that each rank contributes, its shard padded to the largest."""
        if self.kind == "all_gather":
            return self.src.max_local_numel(self.shape)
        if self.kind == "reduce_scatter":
            return self.dst.max_local_numel(self.shape) * self.size
        return self.src.max_local_numel(self.shape)

    @property
    def temporary_bytes(self) -> int:
        """Temporary bytes per rank, beside source and destination."""
        copies = {"all_gather": self.size, "reduce_scatter": 1, "all_reduce": 0}
        return self.padded_elements * copies[self.kind] * self.dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes received by all ranks of all groups."""
        others = self.size - 1
        share = {"all_gather": 1, "reduce_scatter": 1 / self.size, "all_reduce": 2 / self.size}
        elements = self.padded_elements * others * share[self.kind]
        return round(elements * len(self.src.mesh.holders)) * self.dtype.itemsize

    def seconds(self, costs: Costs) -> float:
        """Predicted time of a ring over the ranks."""
        given = self.padded_elements * self.dtype.itemsize
        turns = (self.size - 1) * (2 if self.kind == "all_reduce" else 1)
        each = given if self.kind == "all_gather" else given / self.size
        near = self._ranks_on_a_node(costs)
        link = costs.collective_within if near == self.size else costs.between
        # Only one of the ranks of a node has its neighbour on another.
        crossing = 1 if near == self.size else near
        moved = turns * (link.latency_s + each / link.bytes_per_s / crossing)
        repacked = given * self.size if self.kind == "all_gather" else given
        copies = repacked / costs.copy_bytes_per_s if self.dim else 0
        return costs.collective_s + moved + copies

    def _ranks_on_a_node(self, costs: Costs) -> int:
        """Ranks of one of the concurrent groups."""
        nodes = costs.nodes()
        if nodes is None:
            return self.size
        mesh = self.src.mesh
        on = [nodes.of(holder) for holder in mesh.group_along(self.axes, [0] * len(mesh.shape))]
        return max(on.count(node) for node in set(on))


@dataclass(frozen=True)
class SearchStep:
    """A step of a way: a collective, or None for an exchange."""

    dst: Layout
    collective: Collective | None


def cheapest_steps(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    costs: Costs,
    direct_s: float,
    exchange_s: Callable[[Layout], float],
    max_bytes: int | None,
) -> list[SearchStep] | None:
    """Return the steps from `src` to `dst` that take less than `direct_s`; empty if there are none.
    `exchange_s` predicts an exchange from a layout to `dst`; no intermediate layout may take more
    than `max_bytes` per rank."""
    order = itertools.count()
    queue: list[tuple[float, int, Layout, list[SearchStep]]] = [(0.0, next(order), src, [])]
    done: set[Layout] = set()
    best_s, best = direct_s, None
    while queue and len(done) < _MOST_STATES:
        so_far, _, layout, steps = heapq.heappop(queue)
        if so_far >= best_s:
            break
        if layout in done:
            continue
        done.add(layout)
        if layout == dst:
            return steps
        if layout != src:
            last_s = so_far + exchange_s(layout)
            if last_s < best_s:
                best_s, best = last_s, [*steps, SearchStep(dst, None)]
        for step, seconds in _edges(layout, dst, shape, dtype, costs):
            total = so_far + seconds
            fits = max_bytes is None or _temporary(step, dst, shape, dtype) <= max_bytes
            if total < best_s and step.dst not in done and fits:
                heapq.heappush(queue, (total, next(order), step.dst, [*steps, step]))
    return best


def _edges(
    layout: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, costs: Costs
) -> list[tuple[SearchStep, float]]:
    edges = [
        (SearchStep(collective.dst, collective), collective.seconds(costs))
        for collective in collectives_from(layout, shape, dtype)
    ]
    for axis, (here, there) in enumerate(zip(layout.placements, dst.placements, strict=True)):
        if isinstance(here, Replicate) and isinstance(there, Shard):
            sharded = scattered(layout, (axis,), there.dim)
            if sharded is not None:
                copied = _bytes(SearchStep(sharded, None), shape, dtype)
                edges.append(
                    (SearchStep(sharded, None), costs.piece_s + copied / costs.copy_bytes_per_s)
                )
    return edges


def _temporary(step: SearchStep, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes per rank of a step: its input, and its result if not the destination."""
    own = 0 if step.collective is None else step.collective.temporary_bytes
    return own + (0 if step.dst == dst else _bytes(step, shape, dtype))


def _bytes(step: SearchStep, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of the largest shard after a step."""
    return step.dst.max_local_numel(shape) * dtype.itemsize


def collectives_from(
    layout: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Collective]:
    """Yield all collectives that apply to a tensor in `layout`."""
    sizes = layout.mesh.shape
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    for count in range(1, _MOST_AXES + 1):
        for chosen in itertools.combinations(axes, count):
            placements = [layout.placements[axis] for axis in chosen]
            # Sums in float16, of which averages are made, would overflow.
            if dtype in _JOINED and all(
                isinstance(p, Partial) and (dtype != torch.float16 or p.reduce_op != "avg")
                for p in placements
            ):
                reduced = _with(layout, dict.fromkeys(chosen, Replicate()))
                yield Collective("all_reduce", layout, reduced, chosen, None, shape, dtype)
                for dim in range(len(shape)):
                    sharded = scattered(layout, chosen, dim)
                    if sharded is not None:
                        yield Collective(
                            "reduce_scatter", layout, sharded, chosen, dim, shape, dtype
                        )
    for dim, splits in layout.splits.items() if dtype in _GATHERED else ():
        for count in range(1, min(_MOST_AXES, len(splits)) + 1):
            last = splits[len(splits) - count :]
            if all(split.factor == 1 for split in last):
                chosen = tuple(split.axis for split in last)
                whole = _with(layout, dict.fromkeys(chosen, Replicate()))
                yield Collective("all_gather", layout, whole, chosen, dim, shape, dtype)


def scattered(layout: Layout, axes: tuple[int, ...], dim: int) -> Layout | None:
    """Return the layout in which `axes` shard `dim` further; None if a stride prevents it."""
    before = layout.splits.get(dim, ())
    if any(split.factor != 1 for split in before):
        return None
    return _with(layout, dict.fromkeys(axes, Shard(dim)), last=(dim, axes))


def _with(
    layout: Layout,
    placements: dict[int, Replicate] | dict[int, Shard],
    last: tuple[int, tuple[int, ...]] | None = None,
) -> Layout:
    """Return the layout with other placements on some axes, which shard a dim `last` if at all."""
    new = [placements.get(axis, p) for axis, p in enumerate(layout.placements)]
    orders = {
        dim: tuple(axis for axis in order if axis not in placements)
        for dim, order in layout.shard_order
    }
    if last is not None:
        dim, axes = last
        plain = tuple(
            axis
            for axis, p in enumerate(layout.placements)
            if isinstance(p, Shard) and p.dim == dim and axis not in axes
        )
        orders[dim] = orders.get(dim, plain) + axes
    return Layout(layout.mesh, new, orders)
