"""What a plan costs each holder, and the least that any plan could cost. Layer: above plan.

Invariant: `lower_bound_bytes` asks the layouts alone, so that it can be held against a plan.
"""

from dataclasses import dataclass
from math import prod

from torchtitan_lite.redistribute.cuts import intervals
from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.pieces import Part, Piece
from torchtitan_lite.redistribute.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one holder, in all rounds."""

    sent: int
    received: int
    stays: int
    """Of the source, what it copies for itself."""
    result: int
    """Its part of the destination."""


def holders_of(plan: Plan) -> tuple[Holder, ...]:
    """All that have a part in either layout, those of the source first."""
    return tuple(dict.fromkeys((*plan.src.mesh.holders, *plan.dst.mesh.holders)))


def traffic(plan: Plan) -> dict[Holder, Traffic]:
    """What each holder of a plan sends and receives."""
    return {holder: _traffic(plan, holder) for holder in holders_of(plan)}


def _traffic(plan: Plan, holder: Holder) -> Traffic:
    result = 0
    if plan.dst.mesh.place(holder) is not None:
        result = prod(plan.local_shape(holder)) * plan.dtype.itemsize
    if plan.is_nothing:
        return Traffic(sent=0, received=0, stays=result, result=result)
    parts = plan.part(holder)
    return Traffic(
        sent=sum(_bytes(plan, part.sends) for part in parts),
        received=sum(_bytes(plan, part.receives) for part in parts),
        stays=sum(_bytes(plan, part.copies) for part in parts),
        result=result,
    )


def _bytes(plan: Plan, pieces: list[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces) * plan.dtype.itemsize


def temporary_bytes(plan: Plan, bucket_bytes: int) -> int:
    """The most that any holder needs beside its parts of source and destination: two buckets, or
    what the busiest round sends and receives where that is less."""
    if plan.moved_bytes == 0:
        return 0

    def load(part: Part) -> int:
        return _bytes(plan, part.sends) + _bytes(plan, part.receives)

    busiest = max(load(part) for holder in holders_of(plan) for part in plan.part(holder))
    return min(busiest, 2 * bucket_bytes)


def lower_bound_bytes(plan: Plan) -> int | None:
    """The least bytes that have to go from one holder to another; None where the destination has
    contributions, whose value is free to lie with any of them.

    Without contributions, a holder lacks what it does not have. With p of them and n destinations,
    n - 1 holders get an element from another after p - 1 contributions came to a contributor that
    is a destination; where there is none, one more has to come.
    """
    src, dst, shape = plan.src, plan.dst, plan.shape
    if plan.is_nothing:
        return 0
    if _size(dst, dst.partial_axes) > 1:
        return None
    whole, itemsize = prod(shape), plan.dtype.itemsize
    cutting = [cut.axis for cuts in dst.cuts.values() for cut in cuts]
    replicas = _size(dst, [a for a in range(len(dst.mesh.shape)) if a not in cutting])
    contributions = _size(src, src.partial_axes)
    # By part of either layout: what a holder of both already has.
    common: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    saved = 0
    for holder in dst.mesh.holders:
        given, wanted = src.mesh.coordinate(holder), dst.mesh.coordinate(holder)
        if given is None or wanted is None:
            continue
        parts = _parts(src, len(shape), given), _parts(dst, len(shape), wanted)
        if parts not in common:
            common[parts] = _common(plan, *parts)
            saved += common[parts] if contributions > 1 else 0
        saved += common[parts] if contributions == 1 else 0
    return (whole * (contributions - 1 + replicas) - saved) * itemsize


def _size(layout: Layout, axes: list[int] | tuple[int, ...]) -> int:
    return prod(layout.mesh.shape[axis] for axis in axes)


def _parts(layout: Layout, ndim: int, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(layout.part(dim, coordinate) for dim in range(ndim))


def _common(plan: Plan, given: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """Elements that a part of the source and one of the destination have in common."""
    common = 1
    for dim, length in enumerate(plan.shape):
        one = intervals(length, plan.src.cuts.get(dim, ()), given[dim])
        other = intervals(length, plan.dst.cuts.get(dim, ()), wanted[dim])
        common *= sum(
            max(0, min(a + m, b + n) - max(a, b)) for a, m in one for b, n in other if m and n
        )
    return common
