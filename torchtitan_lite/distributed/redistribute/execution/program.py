"""The transfers of one holder in a fused exchange, as copies between raw views of tensors.

A raw view is an array of integers of 1, 2, 4 or 8 bytes, of the largest width that divides the
element size of all tensors of the exchange, so that tensors of any dtype share a buffer and move
bit by bit. numpy starts the copy of a rectangle in a third of the time that torch takes, but has no
bfloat16 or float8; raw views of them are plain integers.

A round is divided into buckets of bounded size. Bucket b has the same fraction of a tensor on every
rank, so ranks need not communicate what a bucket contains.
"""

import ctypes
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from torchtitan_lite.distributed.redistribute.planning.partition import SharedRanges
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.plan import Plan
from torchtitan_lite.distributed.redistribute.planning.transfers import (
    RoundKind,
    RoundTransfers,
    Transfer,
)

Span = tuple[tuple[int, int], ...]
"""Per dim: [start, stop)."""

Slices = tuple[slice, ...]

RawArray = Any
"""A numpy array on a CPU, a tensor elsewhere; both are indexed and assigned alike."""

RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Raw dtypes by width in bytes."""

_NUMPY_RAW_DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}

_REDUCE = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}

LINE_BYTES = 64
"""Alignment of buffers, and of tensors in a slot: cache lines."""

_WIDE_ELEMENTS = 1 << 16
"""Elements reduced in float32 at a time."""


class Rectangle(NamedTuple):
    """A rectangle in a source's shard and in a destination's."""

    src: tuple[int, ...]
    """Its start in the source's shard."""
    dst: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TensorTask:
    """One tensor of a fused exchange, as seen by one holder."""

    plan: Plan
    me: Holder
    width: int
    """Bytes per raw element."""
    readers: Mapping[Holder, Holder] = field(default_factory=dict)
    """Return the sender of a holder's data: itself, if it is a process."""

    @cached_property
    def sender(self) -> Holder | None:
        """The holder whose data this rank sends."""
        return next(iter(self.senders([self.me])), None)

    def senders(self, ranks: Iterable[Holder]) -> list[Holder]:
        """Return the holders whose data some ranks send: themselves, if they are processes."""
        ranks = set(ranks)
        if not self.readers:
            return list(ranks)
        return [source for source, reader in self.readers.items() if reader in ranks]

    def reader(self, holder: Holder) -> Holder:
        """Reader of each source that is not a process, such as a file. Only their data is moved;
        without any, all of it."""
        return self.readers.get(holder, holder)

    @cached_property
    def transfers(self) -> tuple[RoundTransfers, ...]:
        if not self.readers:
            return self.plan.transfers(self.me)
        # Sources have no part of the destination, so that what this one acts for gives it the rest.
        (own,) = self.plan.transfers(self.me)
        sends = [] if self.sender is None else self.plan.transfers(self.sender)[0].sends
        receives = [piece for piece in own.receives if piece.peer in self.readers]
        return (
            RoundTransfers(
                [piece for piece in sends if piece.peer != self.me],
                [piece for piece in receives if piece.peer != self.sender],
                [piece for piece in receives if piece.peer == self.sender],
                [],
            ),
        )

    @property
    def ratio(self) -> int:
        """Raw elements per element."""
        return self.plan.dtype.itemsize // self.width

    def kind(self, index: int) -> RoundKind | None:
        """Return the transfers of round `index`; None if the plan has fewer."""
        rounds = self.plan.rounds
        return rounds[index] if index < len(rounds) else None

    def max_local_raw(self, index: int) -> int:
        """Return the raw elements of the largest shard sent from in round `index`."""
        kind = self.kind(index)
        return 0 if kind is None else self.plan.exchange.max_local_numel(kind) * self.ratio

    def max_moved_raw(self, index: int) -> int:
        """Return the maximum raw elements that a holder sends and receives in round `index`."""
        kind = self.kind(index)
        return 0 if kind is None else self.plan.exchange.max_moved(kind) * self.ratio

    def raw_local_shape(self, holder: Holder, index: int) -> tuple[int, ...]:
        """Return the raw shape from which a holder sends in round `index`."""
        kind = self.kind(index)
        assert kind is not None
        shape = self.plan.exchange.local_shape(holder, kind)
        if shape is None:
            return (0,)
        return (*shape[:-1], shape[-1] * self.ratio) if shape else (self.ratio,)

    def rectangles(
        self, piece: Transfer, index: int, start: int = 0, stop: int = 1, of: int = 1
    ) -> Iterator["Rectangle"]:
        """Yield the raw rectangles of a transfer, optionally only its elements from `start` to
        `stop` parts `of` it. Both sides are the destination's if results are broadcast."""
        size = piece.stop - piece.start
        first, last = piece.start + size * start // of, piece.start + size * stop // of
        ranges = piece.ranges
        if self.kind(index) == "broadcast":
            ranges = tuple(tuple((d, d, n) for _, d, n in dim) for dim in ranges)
        return rectangles(*to_raw(ranges, first, last, self.ratio))


class BucketRange(NamedTuple):
    """The part of a tensor in a bucket: [start, stop) of `whole`, and its start in the bucket's
    buffer."""

    tensor: int
    start: int
    stop: int
    whole: int
    offset: int


def aligned(num_bytes: int) -> int:
    """Return the number of bytes up to the next cache line."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def assign_buckets(weights: Sequence[int], capacity: int, align: int) -> list[list[BucketRange]]:
    """Assign tensors of `weights` raw elements to buckets of `capacity` in sequence; each starts at
    a multiple of `align`, which divides `capacity`."""
    buckets: list[list[BucketRange]] = [[]]
    used = 0
    for tensor, weight in enumerate(weights):
        start = 0
        while start < weight:
            if used >= capacity:
                buckets.append([])
                used = 0
            stop = min(weight, start + capacity - used)
            buckets[-1].append(BucketRange(tensor, start, stop, weight, used))
            used += -(-(stop - start) // align) * align
            start = stop
    return buckets


def spans(lengths: Sequence[int], start: int, stop: int) -> list[Span]:
    """Yield the elements [start, stop) of an array, in row-major order, as rectangles of contiguous
    elements, in order."""
    if start >= stop:
        return []
    if not lengths:
        return [()]
    row = prod(lengths[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [((first, first + 1), *rest) for rest in spans(lengths[1:], head, tail)]
    pieces: list[Span] = []
    if head:
        pieces += [((first, first + 1), *rest) for rest in spans(lengths[1:], head, row)]
        first += 1
    if first < last:
        pieces.append(((first, last), *((0, length) for length in lengths[1:])))
    if tail:
        pieces += [((last, last + 1), *rest) for rest in spans(lengths[1:], 0, tail)]
    return pieces


def rectangles(ranges: Sequence[SharedRanges], start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the elements [start, stop) of a transfer as rectangles, in a deterministic order."""
    lengths = [sum(length for _, _, length in dim) for dim in ranges]
    if start == 0 and stop == prod(lengths):
        # By far the most pieces: whole, and of one range a dim.
        yield from _product_of(ranges)
        return
    for span in spans(lengths, start, stop):
        per_dim = [_clipped(dim, *bounds) for dim, bounds in zip(ranges, span, strict=True)]
        yield from _product_of(per_dim)


def _product_of(per_dim: Sequence[SharedRanges]) -> Iterator[Rectangle]:
    for combination in itertools.product(*per_dim):
        src, dst, shape = zip(*combination, strict=True) if combination else ((), (), ())
        yield Rectangle(src, dst, shape)


def _clipped(ranges: SharedRanges, start: int, stop: int) -> SharedRanges:
    """Return the ranges of a dim in [start, stop) of their common length."""
    clipped, before = [], 0
    for src, dst, length in ranges:
        first, last = max(start - before, 0), min(stop - before, length)
        if first < last:
            clipped.append((src + first, dst + first, last - first))
        before += length
    return tuple(clipped)


def to_raw(
    ranges: tuple[SharedRanges, ...], start: int, stop: int, ratio: int
) -> tuple[tuple[SharedRanges, ...], int, int]:
    """Return a transfer in raw elements, `ratio` of which make an element; a scalar has one dim."""
    if not ranges:
        ranges = (((0, 0, 1),),)
    if ratio == 1:
        return ranges, start, stop
    last = tuple((src * ratio, dst * ratio, length * ratio) for src, dst, length in ranges[-1])
    return (*ranges[:-1], last), start * ratio, stop * ratio


def slices(first: Sequence[int], shape: Sequence[int]) -> Slices:
    """Return the index of a rectangle in an array."""
    return tuple(slice(a, a + n) for a, n in zip(first, shape, strict=True))


def intersect_span(
    first: Sequence[int], shape: Sequence[int], span: Span
) -> tuple[list[int], list[int]] | None:
    """Return the intersection of two rectangles: start and shape; None if empty."""
    starts, lengths = [], []
    for at, length, (low, high) in zip(first, shape, span, strict=True):
        start, stop = max(at, low), min(at + length, high)
        if start >= stop:
            return None
        starts.append(start)
        lengths.append(stop - start)
    return starts, lengths


def group_by_region(places: Iterable[tuple[int, Slices]]) -> list[list[int]]:
    """Group the indices of `places`, (tensor, position), by position: what arrives at one position
    is reduced together."""
    by_region: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        by_region.setdefault(repr(place), []).append(index)
    return list(by_region.values())


class LocalReduction(NamedTuple):
    """How partial values are reduced on a rank."""

    dtype: torch.dtype
    op: str
    factor: float
    """Factor of the result."""

    def apply_(self, into: torch.Tensor, contributions: Sequence[torch.Tensor]) -> None:
        """Reduce contributions, given as raw views of the dtype, into the first. Dtypes of less
        than 32 bits are computed in float32 and rounded once."""
        dtype, reduce, factor = self.dtype, _REDUCE[self.op], self.factor
        into = into.view(dtype)
        contributions = [contribution.view(dtype) for contribution in contributions]
        if not dtype.is_floating_point or dtype.itemsize >= 4:
            for contribution in contributions:
                reduce(into, contribution, out=into)
            if factor != 1:
                into.mul_(factor)
            return
        # Part by part on a CPU, so that little memory is needed beside buckets; on a GPU launches
        # would take longer than the work.
        dim = max(range(into.ndim), key=into.shape.__getitem__)
        most = _WIDE_ELEMENTS if into.is_cpu else max(1, into.numel())
        length = max(1, most * into.shape[dim] // max(1, into.numel()))
        split = (tensor.split(length, dim) for tensor in (into, *contributions))
        for total, *transfers in zip(*split, strict=True):
            wide = total.float()
            for part in transfers:
                reduce(wide, part.float(), out=wide)
            total.copy_(wide.mul_(factor) if factor != 1 else wide)


def local_reduction(task: TensorTask, scales: bool) -> LocalReduction:
    """Return how a task's contributions are reduced. `scales`: all contributions to an element meet
    at once, so the factor of averages is applied before rounding."""
    plan = task.plan
    factor = plan.factor if scales and plan.is_scaled_in_reduction else 1.0
    return LocalReduction(plan.dtype, plan.op, factor)


def identity_element(dtype: torch.dtype, op: str) -> Any:
    """Return the identity element of the reduction."""
    if op in ("sum", "product"):
        return 0 if op == "sum" else 1
    if dtype == torch.bool:
        return op == "min"
    if not dtype.is_floating_point:
        whole = torch.iinfo(dtype)
        return whole.max if op == "min" else whole.min
    if dtype.itemsize == 1:
        # Not every float8 has an infinity.
        small = torch.finfo(dtype)
        return small.max if op == "min" else small.min
    return float("inf") if op == "min" else float("-inf")


def raw_itemsize(dtypes: Iterable[torch.dtype]) -> int:
    """Return the largest raw width that divides the element size of all `dtypes`."""
    return min((min(dtype.itemsize, 8) for dtype in dtypes), default=1)


def has_raw_view(tensor: torch.Tensor, width: int) -> bool:
    """Whether a tensor has a raw view without a copy: an element of several raw elements must be
    adjacent to its neighbor in the last dim."""
    return (
        tensor.dtype.itemsize == width
        or tensor.is_contiguous()
        or tensor.stride(-1) == 1
        or tensor.numel() == 0
    )


def sent_arrays(
    sources: Sequence[RawArray], destinations: Sequence[RawArray], kinds: Sequence[str | None]
) -> list[RawArray]:
    """Return the arrays that a round reads from: in a broadcast, the reduced destinations."""
    return [
        destination if kind == "broadcast" else source
        for source, destination, kind in zip(sources, destinations, kinds, strict=True)
    ]


def raw_array(tensor: torch.Tensor, width: int) -> RawArray:
    """Return the raw view whose copies start fastest. A CPU view does not keep `tensor` alive."""
    if tensor.device.type != "cpu":
        return raw_tensor(tensor, width)
    ratio = tensor.dtype.itemsize // width
    shape = (*tensor.shape[:-1], tensor.shape[-1] * ratio) if tensor.ndim else (ratio,)
    if 0 in shape:
        return np.empty(shape, _NUMPY_RAW_DTYPES[width])
    if tensor.is_contiguous():
        memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
        return np.frombuffer(memoryview(memory), _NUMPY_RAW_DTYPES[width]).reshape(shape)
    last = sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    nbytes = (last + 1) * tensor.dtype.itemsize
    memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    words = np.frombuffer(memoryview(memory), _NUMPY_RAW_DTYPES[width])
    steps = [stride * tensor.dtype.itemsize for stride in tensor.stride()]
    steps[-1] = width if ratio > 1 else steps[-1]
    return np.lib.stride_tricks.as_strided(words, shape, steps, writeable=False)


def raw_tensor(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return the raw view of a tensor; a scalar has one dim."""
    shape = tensor.shape or (1,)
    strides = _strides(shape) if tensor.is_contiguous() else tensor.stride()
    return tensor.detach().as_strided(shape, strides).view(RAW_DTYPES[width])


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous array: a dim of one element may have any stride, and a raw
    view needs 1."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return strides[::-1]


def raw_numpy_dtype(width: int) -> type[np.integer]:
    """numpy's dtype of a raw element."""
    return _NUMPY_RAW_DTYPES[width]
