"""Whether other legs than one exchange lead somewhere sooner. Layer: above collective.

Dijkstra's algorithm over the layouts of a mesh: the edges are collectives, cuts without a message,
and from every layout the exchange straight to the goal. The direct exchange is always one of the
ways, so that the search looks only at what is cheaper; it is the same on every rank.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.redistribute.collective import Collective, collectives_from, scattered
from torchtitan_lite.redistribute.cost import Costs
from torchtitan_lite.redistribute.layout import Layout

_MOST_STATES = 24
"""Layouts whose edges are looked at. What is cheaper than an exchange has few legs."""


@dataclass(frozen=True)
class Leg:
    """One step of a way: a collective, or None for an exchange."""

    dst: Layout
    collective: Collective | None


def shortest(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    costs: Costs,
    direct_s: float,
    exchange_s: Callable[[Layout], float],
    most_bytes: int | None,
) -> list[Leg] | None:
    """The legs from `src` to `dst` that take less than `direct_s`; None where there are none.

    `exchange_s` predicts an exchange from a layout to `dst`; no layout in between may take more
    than `most_bytes` on a rank.
    """
    order = itertools.count()
    queue: list[tuple[float, int, Layout, list[Leg]]] = [(0.0, next(order), src, [])]
    done: set[Layout] = set()
    best_s, best = direct_s, None
    while queue and len(done) < _MOST_STATES:
        so_far, _, layout, legs = heapq.heappop(queue)
        if so_far >= best_s:
            break
        if layout in done:
            continue
        done.add(layout)
        if layout == dst:
            return legs
        if layout != src:
            last_s = so_far + exchange_s(layout)
            if last_s < best_s:
                best_s, best = last_s, [*legs, Leg(dst, None)]
        for leg, seconds in _edges(layout, dst, shape, dtype, costs):
            total = so_far + seconds
            fits = most_bytes is None or _temporary(leg, dst, shape, dtype) <= most_bytes
            if total < best_s and leg.dst not in done and fits:
                heapq.heappush(queue, (total, next(order), leg.dst, [*legs, leg]))
    return best


def _edges(
    layout: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, costs: Costs
) -> list[tuple[Leg, float]]:
    edges = [
        (Leg(collective.dst, collective), collective.seconds(costs))
        for collective in collectives_from(layout, shape, dtype)
    ]
    for axis, (here, there) in enumerate(zip(layout.placements, dst.placements, strict=True)):
        if isinstance(here, Replicate) and isinstance(there, Shard):
            cut = scattered(layout, (axis,), there.dim)
            if cut is not None:
                copied = _bytes(Leg(cut, None), shape, dtype)
                edges.append((Leg(cut, None), costs.piece_s + copied / costs.copy_bytes_per_s))
    return edges


def _temporary(leg: Leg, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a rank for a leg: its own, and its result where that is not yet the goal."""
    own = 0 if leg.collective is None else leg.collective.temporary_bytes
    return own + (0 if leg.dst == dst else _bytes(leg, shape, dtype))


def _bytes(leg: Leg, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of the largest part after a leg."""
    return leg.dst.largest_part(shape) * dtype.itemsize
