"""Orthogonalization of sharded matrices: one owner rank runs the Newton-Schulz iteration of each.

`assign_matrices` chooses owners and buckets from layouts alone, so that all ranks agree without
communication. `ShardedOrthogonalization` moves each bucket to the owners and back in fused
exchanges of the redistribution planner, while the owners work on the bucket before.

Invariant: every rank runs the same exchanges in the same order, whatever it owns.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from math import prod
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch

from torchtitan_lite.distributed.redistribute import Layout, Plan, TensorSpec, choose_owners, plan
from torchtitan_lite.distributed.redistribute.execution.execute import FusedExchange, fused_exchange
from torchtitan_lite.distributed.redistribute.planning.cost import (
    CPU,
    DEFAULT_OPTIONS,
    Costs,
    ExchangeOptions,
)
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.optim.newton_schulz import NewtonSchulz

BUCKET_BYTES = 32 << 20
"""Bytes of a bucket's matrices on an owner; three buckets are at work at a time, in the memory of
two."""

_SMALL_BYTES = 1 << 20
"""Buckets are not made smaller than this for the sake of overlap: exchanges have a latency."""

_MIN_BUCKETS = 4
"""Buckets for overlap: all but the first and the last exchange are hidden."""

_ALIGN = 64
"""Alignment of matrices in a bucket, in bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """A matrix of a parameter: the parameter itself, or an element of a stack."""

    parameter: int
    """Index of the parameter."""
    spec: TensorSpec
    """Layout and shape of the matrix, and the dtype in which it moves."""
    local_index: int | None
    """Its index in the shards of a stack; None: the parameter is the matrix."""
    flops: int
    owner: Holder
    bucket: int | None
    """None: it is entirely on its owner and nowhere else."""
    costs: Costs

    @property
    def to_owner(self) -> Plan:
        """The plan from the shards to the owner."""
        return self._plan(self.spec.layout, Layout.on_holder(self.owner))

    @property
    def from_owner(self) -> Plan:
        """The plan from the owner to the shards."""
        return self._plan(Layout.on_holder(self.owner), self.spec.layout)

    @property
    def moved_bytes(self) -> int:
        """Bytes to the owner and back."""
        return self.to_owner.moved_bytes + self.from_owner.moved_bytes

    def _plan(self, src: Layout, dst: Layout) -> Plan:
        return plan(src, dst, self.spec.shape, self.spec.dtype, costs=self.costs)

    def shard(self, parameters: Sequence[torch.Tensor], rank: Holder) -> torch.Tensor | None:
        """Return this rank's shard of the matrix, given its shards of all parameters; None if it
        has none."""
        if self.spec.layout.mesh.position(rank) is None:
            return None
        whole = parameters[self.parameter]
        return whole if self.local_index is None else whole[self.local_index]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Assignment of matrices to the ranks that orthogonalize them, in order."""

    matrices: tuple[Matrix, ...]
    ranks: tuple[int, ...]
    """All ranks that hold a part of any matrix, which share the work."""

    @cached_property
    def buckets(self) -> tuple[tuple[Matrix, ...], ...]:
        """The matrices that move, by bucket."""
        count = max((m.bucket + 1 for m in self.matrices if m.bucket is not None), default=0)
        return tuple(tuple(m for m in self.matrices if m.bucket == b) for b in range(count))

    @property
    def moved_bytes(self) -> int:
        """Bytes sent between ranks, to the owners and back."""
        return sum(matrix.moved_bytes for matrix in self.matrices)

    @cached_property
    def flops(self) -> dict[Holder, int]:
        """Floating-point operations per rank."""
        sums: dict[Holder, int] = dict.fromkeys(self.ranks, 0)
        for matrix in self.matrices:
            sums[matrix.owner] += matrix.flops
        return sums


def assign_matrices(
    specs: Sequence[TensorSpec],
    iteration: NewtonSchulz,
    *,
    costs: Costs = CPU,
    bucket_bytes: int = BUCKET_BYTES,
) -> Assignment:
    """Assign the matrices of parameters to owners: balanced by FLOPs, and such that few bytes move.
    `specs` are of two dims, or of three: a stack of matrices, each with an owner of its own.
    `costs` are those of planning the exchanges."""
    located: list[tuple[int, TensorSpec, int | None]] = []
    for parameter, spec in enumerate(specs):
        shape = spec.shape[-2:]
        if len(spec.shape) == 2:
            located.append((parameter, TensorSpec(spec.layout, shape, iteration.dtype), None))
            continue
        for index in range(spec.shape[0]):
            layout, local_index = spec.layout.of_element(spec.shape, index)
            located.append((parameter, TensorSpec(layout, shape, iteration.dtype), local_index))
    holders = {holder for spec in specs for holder in spec.layout.mesh.holders}
    ranks = tuple(sorted(holder for holder in holders if isinstance(holder, int)))
    flops = [iteration.flops((spec.shape[0], spec.shape[1])) for _, spec, _ in located]
    owners = choose_owners([spec for _, spec, _ in located], flops, ranks)
    matrices = [
        Matrix(
            parameter=parameter,
            spec=spec,
            local_index=local_index,
            flops=work,
            owner=owner,
            bucket=None,
            costs=costs,
        )
        for (parameter, spec, local_index), work, owner in zip(located, flops, owners, strict=True)
    ]
    return Assignment(matrices=tuple(_in_buckets(matrices, bucket_bytes)), ranks=ranks)


def _in_buckets(matrices: Sequence[Matrix], bucket_bytes: int) -> Iterator[Matrix]:
    """Give the matrices that move their buckets. Each owner has an equal part of its work in each
    bucket, large matrices first, so that owners do not wait for each other."""
    moved = [matrix for matrix in matrices if matrix.moved_bytes]
    by_owner: dict[Holder, list[Matrix]] = {}
    for matrix in sorted(moved, key=lambda matrix: -matrix.flops):
        by_owner.setdefault(matrix.owner, []).append(matrix)
    most_bytes = max((sum(map(_num_bytes, owned)) for owned in by_owner.values()), default=0)
    most_matrices = max(map(len, by_owner.values()), default=0)
    count = max(-(-most_bytes // bucket_bytes), min(_MIN_BUCKETS, most_bytes // _SMALL_BYTES), 1)
    count = min(count, most_matrices)
    buckets: dict[int, int] = {}
    for owned in by_owner.values():
        ends = list(accumulate(matrix.flops for matrix in owned))
        for matrix, end in zip(owned, ends, strict=True):
            # The bucket of the middle of its work.
            buckets[id(matrix)] = (2 * end - matrix.flops) * count // (2 * ends[-1])
    for matrix in matrices:
        yield replace(matrix, bucket=buckets.get(id(matrix)))


def _num_bytes(matrix: Matrix) -> int:
    return prod(matrix.spec.shape) * matrix.spec.dtype.itemsize


class ShardedOrthogonalization:
    """Orthogonalizes this rank's shards of matrices, together with the other ranks."""

    def __init__(
        self,
        assignment: Assignment,
        iteration: NewtonSchulz,
        *,
        rank: int,
        device: torch.device,
        options: ExchangeOptions = DEFAULT_OPTIONS,
    ) -> None:
        """`device` is where matrices move and are orthogonalized."""
        self._assignment, self._iteration = assignment, iteration
        self._rank, self._device, self._options = rank, device, options
        self._exchanges: list[tuple[FusedExchange, FusedExchange]] = []
        own = [[m for m in bucket if m.owner == rank] for bucket in assignment.buckets]
        self._local = [m for m in assignment.matrices if m.bucket is None and m.owner == rank]
        self._slot_bytes = [
            max((sum(map(_aligned, bucket)) for bucket in own[parity::2]), default=0)
            for parity in (0, 1)
        ]

    def run(self, shards: Sequence[torch.Tensor]) -> None:
        """Orthogonalize the matrices of all parameters, of which `shards` are this rank's parts: in
        the iteration's dtype, contiguous, on the device, in place. Every rank of the assignment
        must call it."""
        local = [matrix.shard(shards, self._rank) for matrix in self._local]
        if not self._assignment.buckets:
            self._orthogonalize(local)
            return
        with _background(self._device) as background:
            self._run(shards, local, background)

    def _run(
        self,
        shards: Sequence[torch.Tensor],
        local: Sequence[torch.Tensor | None],
        background: "_Background",
    ) -> None:
        buckets, rank = self._assignment.buckets, self._rank
        if not self._exchanges:
            self._exchanges = [self._exchanges_of(bucket) for bucket in buckets]
        slots = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._slot_bytes
        ]
        parts = [[matrix.shard(shards, rank) for matrix in bucket] for bucket in buckets]
        wholes = [_views(bucket, rank, slots[index % 2]) for index, bucket in enumerate(buckets)]

        def gather(index: int) -> "_Started":
            exchange = self._exchanges[index][0]
            return background.start(partial(exchange.run, parts[index], wholes[index]))

        def scatter(index: int) -> "_Started":
            exchange = self._exchanges[index][1]
            return background.start(partial(exchange.run, wholes[index], parts[index]))

        gathered = [gather(index) for index in range(len(buckets[:2]))]
        self._orthogonalize(local)
        scattered: list[_Started] = []
        for index in range(len(buckets)):
            gathered[index].wait()
            self._orthogonalize(wholes[index])
            scattered.append(scatter(index))
            if index + 2 < len(buckets):
                # Into the slot that is sent before it.
                gathered.append(gather(index + 2))
        scattered[-1].wait()

    def _orthogonalize(self, matrices: Sequence[torch.Tensor | None]) -> None:
        for matrix in matrices:
            if matrix is not None:
                self._iteration.orthogonalize_(matrix)

    def _exchanges_of(self, bucket: Sequence[Matrix]) -> tuple[FusedExchange, FusedExchange]:
        ranks = self._assignment.ranks
        first, second = (
            fused_exchange(plans, ranks, self._device, self._options)
            for plans in ([m.to_owner for m in bucket], [m.from_owner for m in bucket])
        )
        return first, second


def _aligned(matrix: Matrix) -> int:
    return -(-_num_bytes(matrix) // _ALIGN) * _ALIGN


def _views(bucket: Sequence[Matrix], rank: Holder, slot: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the matrices of a bucket that this rank owns, as views of a slot; None for others."""
    views: list[torch.Tensor | None] = []
    offset = 0
    for matrix in bucket:
        if matrix.owner != rank:
            views.append(None)
            continue
        raw = slot[offset : offset + _num_bytes(matrix)]
        views.append(raw.view(matrix.spec.dtype).view(matrix.spec.shape))
        offset += _aligned(matrix)
    return views


class _Started(Protocol):
    def wait(self) -> None:
        """Block this rank's work until it is done; raise its error."""
        ...


class _Background(Protocol):
    def start(self, call: Callable[[], None]) -> _Started:
        """Run `call` after those started before, beside this rank's work."""
        ...


@contextmanager
def _background(device: torch.device) -> Iterator[_Background]:
    """Return what runs exchanges beside the iteration: a thread on a CPU, a stream on a GPU."""
    if device.type == "cuda":
        yield _background_stream(device)
        return
    thread = _BackgroundThread()
    try:
        yield thread
    finally:
        thread.end()


class _BackgroundThread:
    """A thread for one step, because it blocks where a peer is lost: as a daemon, it does not keep
    its process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[_Future, Callable[[], None]] | None] = SimpleQueue()
        Thread(target=self._serve, name="orthogonalization", daemon=True).start()

    def start(self, call: Callable[[], None]) -> "_Future":
        future = _Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        """End the thread after the calls that were started."""
        self._calls.put(None)

    def _serve(self) -> None:
        failure: BaseException | None = None
        while (queued := self._calls.get()) is not None:
            future, call = queued
            # After a failure the ranks are no longer in step.
            if failure is None:
                try:
                    call()
                except BaseException as error:
                    failure = error
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)


class _Future(Future[None]):
    def wait(self) -> None:
        self.result()


class _BackgroundStream:
    """A stream beside the current one: the host starts all calls without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, call: Callable[[], None]) -> "_StreamMark":
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()
        event = torch.cuda.Event()
        event.record(self._stream)
        return _StreamMark(event)


@cache
def _background_stream(device: torch.device) -> _BackgroundStream:
    """Return the stream of all steps, because the allocator keeps memory by stream."""
    return _BackgroundStream(device)


class _StreamMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
