"""Reference implementation of layouts and plans in numpy, element by element.

The elements of a holder are lists of indices, without the planner's arithmetic of boxes:
`torch.chunk` and DTensor's strided shard are applied to a list of indices, as they are defined.

`replay` executes a plan, holder by holder, and traces every element. An element of the source is
identified by its token: the number of its contribution, and its index in the tensor. Contributions
are random integers, so the result is exact.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from torch.distributed.tensor import Partial, Placement, Replicate

from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, Plan
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.transfers import Transfer
from torchtitan_lite.distributed.torch_compat import is_strided_shard, split_factor

REDUCE: dict[str, np.ufunc] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
IDENTITY = {"sum": 0, "product": 1, "min": 1 << 40, "max": -(1 << 40)}
VALUES = {"sum": (1, 50), "product": (1, 3), "min": (-50, 50), "max": (-50, 50)}


def chunk(indices: np.ndarray, count: int) -> list[np.ndarray]:
    """Split into `count` pieces of ceil(length / count); the last may be shorter or empty."""
    size = -(-len(indices) // count)
    return [indices[number * size : (number + 1) * size] for number in range(count)]


def strided(indices: np.ndarray, count: int, index: int, factor: int) -> np.ndarray:
    """Shard `index` of `count` of each of `factor` pieces, concatenated."""
    pieces = [chunk(piece, count)[index] for piece in chunk(indices, factor)]
    return np.concatenate(pieces)


def coordinates(mesh: HolderMesh) -> Iterator[tuple[Holder, tuple[int, ...]]]:
    """Every holder with its coordinate."""
    every = itertools.product(*map(range, mesh.shape))
    return zip(mesh.holders, every, strict=True)


def dims_of(layout: Layout, shape: Sequence[int], at: Sequence[int]) -> list[np.ndarray]:
    """By dim, the indices of the holder at a coordinate, in the order of its storage."""
    orders = dict(layout.shard_order)
    found = []
    for dim, length in enumerate(shape):
        indices = np.arange(length)
        for axis in orders.get(dim, sharding_axes(layout.placements, dim)):
            placement = layout.placements[axis]
            factor = split_factor(placement) if is_strided_shard(placement) else 1
            indices = strided(indices, layout.mesh.shape[axis], at[axis], factor)
        found.append(indices)
    return found


def sharding_axes(placements: Sequence[Placement], dim: int) -> list[int]:
    """The axes that shard a dim."""
    return [
        axis
        for axis, placement in enumerate(placements)
        if not isinstance(placement, (Replicate, Partial)) and getattr(placement, "dim", -1) == dim
    ]


@lru_cache(maxsize=1 << 14)
def elements_of(layout: Layout, shape: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """The flat indices of the elements of the holder at a coordinate: an int64 array of the shape
    of its shard."""
    whole = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    if not shape:
        return whole
    return whole[np.ix_(*dims_of(layout, shape, at))]


@dataclass
class Holding:
    """Data of one holder, flat."""

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Of its shard of the source."""
    out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Its shard of the destination, with the elements reduced so far."""
    src_shape: tuple[int, ...] = ()
    dst_shape: tuple[int, ...] = ()
    received: list[np.ndarray] = field(default_factory=list)
    """Tokens received from other holders."""
    final: list[np.ndarray] = field(default_factory=list)
    """Places of its destination with the final result."""


def replay(plan: Plan, rng: np.random.Generator) -> int:
    """Execute `plan` on random contributions; check what is received, and the result.

    Returns the number of elements that were transferred between holders.
    """
    check_bound(plan)
    contributions = _contributions(plan, rng)
    holdings = _holdings(plan)
    moved = sum(
        _run_round(plan, number, holdings, contributions) for number in range(len(plan.rounds))
    )
    for holder, holding in holdings.items():
        received = np.concatenate([holding.tokens, *holding.received])
        assert len(np.unique(received)) == len(received), f"{holder} receives what it has"
        final = np.concatenate([np.empty(0, np.int64), *holding.final])
        assert len(np.unique(final)) == len(final), f"{holder} receives a result twice"
    _check(plan, holdings, contributions)
    return moved


def check_bound(plan: Plan) -> None:
    """No holder sends and receives more in a round than the bound that sizes the buckets."""
    for holder in (*plan.src.mesh.holders, *plan.dst.mesh.holders):
        for kind, part in zip(plan.rounds, plan.transfers(holder), strict=True):
            pieces = (*part.sends, *part.receives)
            load = sum(piece.stop - piece.start for piece in pieces)
            assert load <= plan.exchange.max_moved(kind), (holder, kind)


def averaged(layout: Layout) -> int:
    """Number of holders over which averages are taken."""
    sizes = zip(layout.mesh.shape, layout.placements, strict=True)
    over = [n for n, p in sizes if isinstance(p, Partial) and p.reduce_op == "avg"]
    return int(np.prod(over, dtype=np.int64))


def contribution_keys(layout: Layout) -> dict[tuple[int, ...], int]:
    """Coordinates on the partial axes -> the number of the contribution."""
    keys = [key_of(layout, at) for _, at in coordinates(layout.mesh)]
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}


def key_of(layout: Layout, at: Sequence[int]) -> tuple[int, ...]:
    """A coordinate on the partial axes alone."""
    return tuple(at[axis] for axis in layout.partial_axes)


def _contributions(plan: Plan, rng: np.random.Generator) -> np.ndarray:
    """Random integers [contribution, element]; divisible if averages are taken."""
    shape = (len(contribution_keys(plan.src)), int(np.prod(plan.shape, dtype=np.int64)))
    scale = averaged(plan.src) * averaged(plan.dst)
    return rng.integers(*VALUES[plan.op], shape) * (scale if plan.op == "sum" else 1)


def _holdings(plan: Plan) -> dict[Holder, Holding]:
    holdings: dict[Holder, Holding] = defaultdict(Holding)
    keys, size = contribution_keys(plan.src), int(np.prod(plan.shape, dtype=np.int64))
    for holder, at in coordinates(plan.src.mesh):
        elements = elements_of(plan.src, plan.shape, at)
        holding = holdings[holder]
        holding.tokens = keys[key_of(plan.src, at)] * size + elements.ravel()
        holding.src_shape = elements.shape
    for holder, at in coordinates(plan.dst.mesh):
        holding = holdings[holder]
        holding.dst_shape = elements_of(plan.dst, plan.shape, at).shape
        # An unfilled place shows in the result, because contributions are not zero.
        holding.out = np.full(int(np.prod(holding.dst_shape)), IDENTITY[plan.op])
    return dict(holdings)


def _run_round(
    plan: Plan, number: int, holdings: dict[Holder, Holding], contributions: np.ndarray
) -> int:
    kind, values, moved = plan.rounds[number], contributions.ravel(), 0
    mail: dict[tuple[Holder, Holder], list[np.ndarray]] = defaultdict(list)
    for holder, holding in holdings.items():
        for piece in plan.transfers(holder)[number].sends:
            assert piece.peer != holder
            here = _places(piece, holding, of_source=kind != "broadcast")
            # Contributions are sent as tokens, results as values.
            mail[holder, piece.peer].append(
                (holding.out if kind == "broadcast" else holding.tokens)[here]
            )
            moved += len(here)
    for holder, holding in holdings.items():
        part = plan.transfers(holder)[number]
        for piece in part.fills:
            here = _places(piece, holding, of_source=False)
            holding.out[here] = IDENTITY[plan.op]
            holding.final.append(here)
        for piece in part.copies:
            here = _places(piece, holding, of_source=False)
            holding.out[here] = values[holding.tokens[_places(piece, holding, of_source=True)]]
            holding.final.append(here)
        for piece in part.receives:
            here, message = (
                _places(piece, holding, of_source=False),
                mail[piece.peer, holder].pop(0),
            )
            assert len(here) == len(message)
            if kind == "reduce":
                holding.received.append(message)
                holding.out[here] = REDUCE[plan.op](holding.out[here], values[message])
                continue
            if kind == "move":
                holding.received.append(message)
            holding.final.append(here)
            holding.out[here] = values[message] if kind == "move" else message
    assert not any(mail.values()), "a message was not received"
    return moved


def _places(piece: Transfer, holding: Holding, *, of_source: bool) -> np.ndarray:
    """Flat places of the elements of a transfer in a shard, in the order of sending."""
    shape = holding.src_shape if of_source else holding.dst_shape
    if not piece.ranges:
        return np.zeros(1, np.int64)[piece.start : piece.stop]
    per_dim = [
        np.concatenate([np.arange(n) + (one if of_source else other) for one, other, n in ranges])
        for ranges in piece.ranges
    ]
    for indices, length in zip(per_dim, shape, strict=True):
        assert len(indices) == 0 or (indices.min() >= 0 and indices.max() < length)
    places = np.ravel_multi_index(np.ix_(*per_dim), shape)
    return places.ravel()[piece.start : piece.stop]


def _check(plan: Plan, holdings: dict[Holder, Holding], contributions: np.ndarray) -> None:
    """Contributions of the destination must reduce to the value."""
    from_averages, to_averages = averaged(plan.src), averaged(plan.dst)
    # Integers alone stay exact: `factor` is a quotient of the two.
    scaled_by = round(plan.factor * from_averages)
    assert scaled_by / from_averages == plan.factor
    value = REDUCE[plan.op].reduce(contributions, axis=0) // from_averages
    groups: dict[tuple[int, ...], np.ndarray] = {}
    elements: dict[tuple[int, ...], np.ndarray] = {}
    for holder, at in coordinates(plan.dst.mesh):
        apart = tuple(i for axis, i in enumerate(at) if axis not in plan.dst.partial_axes)
        out = holdings[holder].out * scaled_by // from_averages
        groups[apart] = REDUCE[plan.op](groups[apart], out) if apart in groups else out
        elements[apart] = elements_of(plan.dst, plan.shape, at).ravel()
    for apart, reduced in groups.items():
        assert np.array_equal(reduced, value[elements[apart]] * to_averages), (
            f"{plan.src} -> {plan.dst} of {plan.shape} at {apart}"
        )
