"""The way from one layout to another, for a tensor of one shape. Layer: above exchange.

Invariant: a plan is a function of its arguments alone, the same on every rank, whatever was planned
before.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch.distributed.tensor import Partial, Replicate

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.exchange import Exchange, Kept, Part, RoundKind
from torchtitan_lite.redistribute.kept import choices
from torchtitan_lite.redistribute.layout import Holder, Layout


@dataclass(frozen=True, eq=False)
class Plan:
    """Made by `plan`."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    exchange: Exchange
    factor: float
    """What the result is multiplied by where averages come in or go out; 1 elsewhere."""

    @property
    def rounds(self) -> tuple[RoundKind, ...]:
        """What happens, one exchange after the other."""
        return self.exchange.rounds

    @property
    def op(self) -> str:
        """What contributions are joined by."""
        return self.src.reduce_op or self.dst.reduce_op or "sum"

    @cached_property
    def is_nothing(self) -> bool:
        """Whether every holder already has what it shall have, and nothing else."""
        return self.src == self.dst

    @cached_property
    def _stays(self) -> dict[Holder, bool]:
        return {}

    def stays(self, holder: Holder) -> bool:
        """Whether a holder's part of the source is its part of the destination, as it is."""
        if holder not in self._stays:
            self._stays[holder] = self.is_nothing or self._is_same_part(holder)
        return self._stays[holder]

    def _is_same_part(self, holder: Holder) -> bool:
        if self.moved_bytes or self.factor != 1 or self.exchange.dst.num_contributions > 1:
            return False
        shape = self.local_shape(holder)
        if self.src.local_shape(self.shape, holder) != shape:
            return False
        copies = [piece for part in self.part(holder) for piece in part.copies]
        whole = tuple(((0, 0, length),) for length in shape)
        return all(piece.segments == whole for piece in copies)

    def local_shape(self, holder: Holder) -> tuple[int, ...]:
        """Of a holder's part of the destination."""
        return self.dst.local_shape(self.shape, holder)

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that go from one holder to another."""
        return 0 if self.is_nothing else self.exchange.total_elements() * self.dtype.itemsize

    @cached_property
    def _parts(self) -> dict[Holder, tuple[Part, ...]]:
        return {}

    def part(self, holder: Holder) -> tuple[Part, ...]:
        """What one holder does in each round."""
        if holder not in self._parts:
            self._parts[holder] = self.exchange.part(holder)
        return self._parts[holder]


@lru_cache(maxsize=4096)
def plan(src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> Plan:
    """The cheapest way to lay a tensor out as `dst` that lies as `src`.

    Raises LayoutError where a layout does not fit the shape, or where contributions would have to
    be joined in two ways.
    """
    src.check(shape)
    dst.check(shape)
    _check_ops(src, dst, shape, dtype)
    equal = _with_equal_copies(dst)
    if equal is not None and src.reduce_op is None:
        copies = Exchange(src, equal, shape, Kept())
        if copies.total_elements() == 0:
            return Plan(src, dst, shape, dtype, copies, 1.0)
    exchanges = [Exchange(src, dst, shape, kept) for kept in choices(src, dst)]
    best = exchanges[0] if len(exchanges) == 1 else min(exchanges, key=Exchange.total_elements)
    return Plan(src, dst, shape, dtype, best, _averaged(dst) / _averaged(src))


def _averaged(layout: Layout) -> int:
    """Holders over which a layout's averages go."""
    return prod(
        size
        for size, placement in zip(layout.mesh.shape, layout.placements, strict=True)
        if isinstance(placement, Partial) and placement.reduce_op == "avg"
    )


def _with_equal_copies(layout: Layout) -> Layout | None:
    """The layout whose contributions are all equal to the value, where that is their join."""
    placements = [
        Replicate() if isinstance(p, Partial) and p.reduce_op in ("avg", "min", "max") else p
        for p in layout.placements
    ]
    if tuple(placements) == layout.placements:
        return None
    return Layout(layout.mesh, placements, layout.shard_order)


def _check_ops(src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given, wanted = src.reduce_op, dst.reduce_op
    if given and wanted and given != wanted:
        raise LayoutError(
            f"No way leads from {src} to {dst} for a tensor of shape {shape}: contributions that "
            f"are joined by {given} are none that are joined by {wanted}. Redistribute to "
            "Replicate or Shard in between."
        )
    real = dtype.is_floating_point or dtype.is_complex
    averaged = _averaged(src) * _averaged(dst)
    if not real and averaged > 1:
        raise LayoutError(f"{dtype} has no averages ({src} to {dst}). Use sums, or a float dtype.")
    if dtype.is_complex and (given or wanted) in ("min", "max"):
        raise LayoutError(f"{dtype} has no {given or wanted} ({src} to {dst}).")
