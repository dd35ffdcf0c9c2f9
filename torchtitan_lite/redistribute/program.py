"""One holder's part of many exchanges as copies between its tensors and buffers.

Everything is counted in words, integers of the smallest width that fits all tensors, so that
tensors of any dtype share a buffer and move bit by bit. Layer: above plan and words.

A round is cut into buckets that hold at most so many words: bucket b has the same share of a tensor
on every rank, so that ranks need not tell each other what a bucket holds.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from torchtitan_lite.redistribute.cuts import Segments
from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.redistribute.pieces import Part, Piece, RoundKind
from torchtitan_lite.redistribute.plan import Plan
from torchtitan_lite.redistribute.words import Reduction

Span = tuple[tuple[int, int], ...]
"""Per dim, [from, to)."""
Slices = tuple[slice, ...]


class Block(NamedTuple):
    """A rectangle that lies in a source's part and in a destination's."""

    src: tuple[int, ...]
    """Its first index in the source's part."""
    dst: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Task:
    """One tensor of a joint exchange, as one holder sees it."""

    plan: Plan
    me: Holder
    width: int
    """Bytes of a word."""
    actors: Mapping[Holder, Holder] = field(default_factory=dict)
    """Who acts for a source that is no process, such as a file: one source each. Of the plan, only
    what comes from these is moved; without any, all of it."""

    @cached_property
    def giver(self) -> Holder | None:
        """What this holder sends as."""
        if not self.actors:
            return self.me
        return next((source for source, actor in self.actors.items() if actor == self.me), None)

    def actor(self, holder: Holder) -> Holder:
        """Who acts for a holder: itself, if it can."""
        return self.actors.get(holder, holder)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        if not self.actors:
            return self.plan.part(self.me)
        # Sources have no part of the destination, so that what this one acts for gives it the rest.
        (own,) = self.plan.part(self.me)
        sends = [] if self.giver is None else self.plan.part(self.giver)[0].sends
        receives = [piece for piece in own.receives if piece.peer in self.actors]
        return (
            Part(
                [piece for piece in sends if piece.peer != self.me],
                [piece for piece in receives if piece.peer != self.giver],
                [piece for piece in receives if piece.peer == self.giver],
                [],
            ),
        )

    @property
    def ratio(self) -> int:
        """Words of an element."""
        return self.plan.dtype.itemsize // self.width

    def kind(self, number: int) -> RoundKind | None:
        """What round `number` does; None where the plan has fewer."""
        rounds = self.plan.rounds
        return rounds[number] if number < len(rounds) else None

    def largest_words(self, number: int) -> int:
        """Words of the largest part that a holder sends from in round `number`."""
        kind = self.kind(number)
        return 0 if kind is None else self.plan.exchange.largest(kind) * self.ratio

    def most_moved_words(self, number: int) -> int:
        """Words that a holder sends and receives in round `number`, at most."""
        kind = self.kind(number)
        return 0 if kind is None else self.plan.exchange.most_moved(kind) * self.ratio

    def local_words(self, holder: Holder, number: int) -> tuple[int, ...]:
        """The shape in words of what a holder sends from in round `number`."""
        kind = self.kind(number)
        assert kind is not None
        shape = self.plan.exchange.local_shape(holder, kind)
        if shape is None:
            return (0,)
        return (*shape[:-1], shape[-1] * self.ratio) if shape else (self.ratio,)

    def blocks(
        self, piece: Piece, number: int, start: int = 0, stop: int = 1, of: int = 1
    ) -> Iterator["Block"]:
        """The rectangles of a piece in words; only the elements from `start` to `stop` parts `of`
        it, where those are given. Both sides of it are the destination's where results are
        spread."""
        size = piece.stop - piece.start
        first, last = piece.start + size * start // of, piece.start + size * stop // of
        segments = piece.segments
        if self.kind(number) == "spread":
            segments = tuple(tuple((d, d, n) for _, d, n in dim) for dim in segments)
        return blocks(*in_words(segments, first, last, self.ratio))


def reduction_of(task: Task, scales: bool) -> Reduction:
    """How a task's contributions are reduced. `scales`: all contributions to an element meet at
    once, so that the factor of averages is applied before the result is rounded."""
    plan = task.plan
    factor = plan.factor if scales and plan.is_scaled_in_reduction else 1.0
    return Reduction(plan.dtype, plan.op, factor)


def by_place(places: Iterable[tuple[int, Slices]]) -> list[list[int]]:
    """The numbers of those of `places`, (tensor, place in it), that are the same, place by place:
    what arrives there is reduced together."""
    found: dict[str, list[int]] = {}
    for number, place in enumerate(places):
        found.setdefault(repr(place), []).append(number)
    return list(found.values())


class Range(NamedTuple):
    """Which part of a tensor a bucket holds: [start, stop) of `whole`, and where that begins in
    the bucket's buffer."""

    tensor: int
    start: int
    stop: int
    whole: int
    offset: int


def buckets(weights: Sequence[int], capacity: int, align: int) -> list[list[Range]]:
    """Share tensors that need `weights` words out over buckets of `capacity` words, one after the
    other; each begins at a multiple of `align`, which divides `capacity`."""
    found: list[list[Range]] = [[]]
    used = 0
    for tensor, weight in enumerate(weights):
        start = 0
        while start < weight:
            if used >= capacity:
                found.append([])
                used = 0
            stop = min(weight, start + capacity - used)
            found[-1].append(Range(tensor, start, stop, weight, used))
            used += -(-(stop - start) // align) * align
            start = stop
    return found


def spans(lengths: Sequence[int], start: int, stop: int) -> list[Span]:
    """The elements [start, stop) of an array, counted in row-major order, as rectangles, each of
    which is one run of elements, in order."""
    if start >= stop:
        return []
    if not lengths:
        return [()]
    row = prod(lengths[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [((first, first + 1), *rest) for rest in spans(lengths[1:], head, tail)]
    found: list[Span] = []
    if head:
        found += [((first, first + 1), *rest) for rest in spans(lengths[1:], head, row)]
        first += 1
    if first < last:
        found.append(((first, last), *((0, length) for length in lengths[1:])))
    if tail:
        found += [((last, last + 1), *rest) for rest in spans(lengths[1:], 0, tail)]
    return found


def blocks(segments: Sequence[Segments], start: int, stop: int) -> Iterator[Block]:
    """The elements [start, stop) of a piece as rectangles, in an order that depends on nothing
    else."""
    lengths = [sum(length for _, _, length in dim) for dim in segments]
    if start == 0 and stop == prod(lengths):
        # By far the most pieces: whole, and of one segment a dim.
        yield from _rectangles(segments)
        return
    for span in spans(lengths, start, stop):
        per_dim = [_clipped(dim, *bounds) for dim, bounds in zip(segments, span, strict=True)]
        yield from _rectangles(per_dim)


def _rectangles(per_dim: Sequence[Segments]) -> Iterator[Block]:
    for combination in itertools.product(*per_dim):
        src, dst, shape = zip(*combination, strict=True) if combination else ((), (), ())
        yield Block(src, dst, shape)


def _clipped(segments: Segments, start: int, stop: int) -> Segments:
    """The segments of a dim that lie in [start, stop) of their common length."""
    found, before = [], 0
    for src, dst, length in segments:
        first, last = max(start - before, 0), min(stop - before, length)
        if first < last:
            found.append((src + first, dst + first, last - first))
        before += length
    return tuple(found)


def in_words(
    segments: tuple[Segments, ...], start: int, stop: int, ratio: int
) -> tuple[tuple[Segments, ...], int, int]:
    """A piece counted in words, `ratio` of which make an element; a scalar as one dim."""
    if not segments:
        segments = (((0, 0, 1),),)
    if ratio == 1:
        return segments, start, stop
    last = tuple((src * ratio, dst * ratio, length * ratio) for src, dst, length in segments[-1])
    return (*segments[:-1], last), start * ratio, stop * ratio


def slices(first: Sequence[int], shape: Sequence[int]) -> Slices:
    """The index of a rectangle in an array."""
    return tuple(slice(a, a + n) for a, n in zip(first, shape, strict=True))


def meet(
    first: Sequence[int], shape: Sequence[int], span: Span
) -> tuple[list[int], list[int]] | None:
    """The rectangle that two have in common: its first index, and its shape; None where they have
    nothing."""
    starts, lengths = [], []
    for at, length, (low, high) in zip(first, shape, span, strict=True):
        start, stop = max(at, low), min(at + length, high)
        if start >= stop:
            return None
        starts.append(start)
        lengths.append(stop - start)
    return starts, lengths
