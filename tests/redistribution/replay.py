"""Carries a plan out in numpy, holder by holder, and watches every element on its way.

An element of the source is known by its token: the number of the contribution that it belongs to,
and its number in the tensor. Contributions are random integers, so the result is exact.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.distributed.tensor import Partial

from tests.redistribution.indices import coordinates, elements_of
from torchtitan_lite.redistribute import Layout, Plan
from torchtitan_lite.redistribute.placements import Holder
from torchtitan_lite.redistribute.transfers import Transfer

JOIN: dict[str, np.ufunc] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
NOTHING = {"sum": 0, "product": 1, "min": 1 << 40, "max": -(1 << 40)}
VALUES = {"sum": (1, 50), "product": (1, 3), "min": (-50, 50), "max": (-50, 50)}


@dataclass
class Holding:
    """What one holder has, flat, and where it takes part."""

    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Of its part of the source."""
    out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Its part of the destination, elements joined so far."""
    src_shape: tuple[int, ...] = ()
    dst_shape: tuple[int, ...] = ()
    joined: list[np.ndarray] = field(default_factory=list)
    """Tokens that have been received from others."""
    settled: list[np.ndarray] = field(default_factory=list)
    """Places of its destination whose result is made here or was received whole."""


def replay(plan: Plan, rng: np.random.Generator) -> int:
    """Carry `plan` out on random contributions and check what is received, and the result.

    Returns the number of elements that went from one holder to another.
    """
    contributions = _contributions(plan, rng)
    holdings = _holdings(plan)
    moved = sum(
        _run_round(plan, number, holdings, contributions) for number in range(len(plan.rounds))
    )
    for holder, holding in holdings.items():
        received = np.concatenate([holding.tokens, *holding.joined])
        assert len(np.unique(received)) == len(received), f"{holder} receives what it has"
        settled = np.concatenate([np.empty(0, np.int64), *holding.settled])
        assert len(np.unique(settled)) == len(settled), f"{holder} receives a result twice"
    _check(plan, holdings, contributions)
    return moved


def averaged(layout: Layout) -> int:
    """Holders over which averages go."""
    sizes = zip(layout.mesh.shape, layout.placements, strict=True)
    over = [n for n, p in sizes if isinstance(p, Partial) and p.reduce_op == "avg"]
    return int(np.prod(over, dtype=np.int64))


def contribution_keys(layout: Layout) -> dict[tuple[int, ...], int]:
    """Coordinates on the axes of contributions -> the number of the contribution."""
    keys = [key_of(layout, at) for _, at in coordinates(layout.mesh)]
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}


def key_of(layout: Layout, at: Sequence[int]) -> tuple[int, ...]:
    """A coordinate on the axes of contributions alone."""
    return tuple(at[axis] for axis in layout.partial_axes)


def _contributions(plan: Plan, rng: np.random.Generator) -> np.ndarray:
    """Random integers [contribution, element]; divisible where averages are taken."""
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
        # A place that nobody fills shows in the result: contributions are no zeros.
        holding.out = np.full(int(np.prod(holding.dst_shape)), NOTHING[plan.op])
    return dict(holdings)


def _run_round(
    plan: Plan, number: int, holdings: dict[Holder, Holding], contributions: np.ndarray
) -> int:
    kind, values, moved = plan.rounds[number], contributions.ravel(), 0
    mail: dict[tuple[Holder, Holder], list[np.ndarray]] = defaultdict(list)
    for holder, holding in holdings.items():
        for piece in plan.transfers(holder)[number].sends:
            assert piece.peer != holder
            here = _places(piece, holding, of_source=kind != "spread")
            # Tokens travel, where contributions do; results travel as values.
            mail[holder, piece.peer].append(
                (holding.out if kind == "spread" else holding.tokens)[here]
            )
            moved += len(here)
    for holder, holding in holdings.items():
        part = plan.transfers(holder)[number]
        for piece in part.fills:
            here = _places(piece, holding, of_source=False)
            holding.out[here] = NOTHING[plan.op]
            holding.settled.append(here)
        for piece in part.copies:
            here = _places(piece, holding, of_source=False)
            holding.out[here] = values[holding.tokens[_places(piece, holding, of_source=True)]]
            holding.settled.append(here)
        for piece in part.receives:
            here, letter = _places(piece, holding, of_source=False), mail[piece.peer, holder].pop(0)
            assert len(here) == len(letter)
            if kind == "reduce":
                holding.joined.append(letter)
                holding.out[here] = JOIN[plan.op](holding.out[here], values[letter])
                continue
            if kind == "move":
                holding.joined.append(letter)
            holding.settled.append(here)
            holding.out[here] = values[letter] if kind == "move" else letter
    assert not any(mail.values()), "something was sent that nobody took"
    return moved


def _places(piece: Transfer, holding: Holding, *, of_source: bool) -> np.ndarray:
    """Flat places of a piece's elements in a part, in the order in which they travel."""
    shape = holding.src_shape if of_source else holding.dst_shape
    if not piece.segments:
        return np.zeros(1, np.int64)[piece.start : piece.stop]
    per_dim = [
        np.concatenate([np.arange(n) + (one if of_source else other) for one, other, n in segments])
        for segments in piece.segments
    ]
    for indices, length in zip(per_dim, shape, strict=True):
        assert len(indices) == 0 or (indices.min() >= 0 and indices.max() < length)
    places = np.ravel_multi_index(np.ix_(*per_dim), shape)
    return places.ravel()[piece.start : piece.stop]


def _check(plan: Plan, holdings: dict[Holder, Holding], contributions: np.ndarray) -> None:
    """The holders of the destination that contribute to the same must make up the value."""
    from_averages, to_averages = averaged(plan.src), averaged(plan.dst)
    # Integers alone stay exact: `factor` is a quotient of the two.
    scaled_by = round(plan.factor * from_averages)
    assert scaled_by / from_averages == plan.factor
    value = JOIN[plan.op].reduce(contributions, axis=0) // from_averages
    groups: dict[tuple[int, ...], np.ndarray] = {}
    elements: dict[tuple[int, ...], np.ndarray] = {}
    for holder, at in coordinates(plan.dst.mesh):
        apart = tuple(i for axis, i in enumerate(at) if axis not in plan.dst.partial_axes)
        out = holdings[holder].out * scaled_by // from_averages
        groups[apart] = JOIN[plan.op](groups[apart], out) if apart in groups else out
        elements[apart] = elements_of(plan.dst, plan.shape, at).ravel()
    for apart, joined in groups.items():
        assert np.array_equal(joined, value[elements[apart]] * to_averages), (
            f"{plan.src} -> {plan.dst} of {plan.shape} at {apart}"
        )
