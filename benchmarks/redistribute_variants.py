"""Variants of a redistribution on one rank: ours, DTensor, and the floor.

The floor is one bare `all_to_all_single` of exactly the bytes that each pair of ranks exchanges,
out of and into flat buffers, plus a copy of the whole result: the cost of moving a state by the
backend's collective if nothing has to be found, packed, or put in its place.

What goes through a collective must be packed and put in its place, though. The packed floor does
that with flat memory: in buckets as large as ours, it copies the bytes of a bucket into a buffer,
exchanges them, and copies them out of one; what is not exchanged is copied once.

The shared floor does the same for ranks that share memory: it copies what this rank sends, once
however many receive it, into its own part of the memory, waits for the others, and copies what it
receives out of theirs. It has two parts in turn, so that one is read while the other is written.
What is in place already is not copied.

The variants alternate in one process. A turn is timed from a barrier to the end of this rank's part
(the slowest rank counts); another barrier follows, and only then the returned value is dropped.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute

from benchmarks.state_dicts import Case, cases
from benchmarks.worker import alternate
from torchtitan_lite.distributed.redistribute import (
    ExchangeOptions,
    HolderMesh,
    Layout,
    TensorSpec,
    plan,
    redistribute_state_dict,
)
from torchtitan_lite.distributed.redistribute.execution.shared_memory import SharedMemory

PLANNERS = ("default", "min-cost")
"""Planners of `DTensor.redistribute`; torch has no public way to select one."""
# Each planner has its own cache: torch's holds the first plan that was made.
_dtensor_caches: dict[str, Any] = {
    name: cache(_redistribute._gen_transform_infos_non_cached) for name in PLANNERS
}
MB = 1 << 20
WARM_OPTIONS = {
    # Slots of shared memory have 4 MiB: larger buckets change nothing.
    **{f"shared {size}": ExchangeOptions(bucket_bytes=size * MB) for size in (1, 4)},
    **{
        f"collective {size}": ExchangeOptions(bucket_bytes=size * MB, transport="collective")
        for size in (4, 25)
    },
}
FRESH_OPTIONS = {
    "shared fresh": ExchangeOptions(),
    "collective fresh": ExchangeOptions(transport="collective"),
}
Variant = Callable[[], Any]


def measure_rank(names: list[str], rounds: int, small: bool) -> dict[str, Any]:
    """Alternate the variants of each case."""
    gc.disable()
    dist.init_process_group("gloo")
    known = cases(dist.get_world_size(), small=small)
    measured: dict[str, Any] = {}
    for name in names:
        variants = Variants(known[name])
        calls = {variant: partial(_seconds, call) for variant, call in variants.calls.items()}
        measured[name] = {
            "seconds": alternate(calls, rounds),
            "right": variants.are_right(),
            "unsupported": variants.unsupported,
            "threads": torch.get_num_threads(),
        }
        del variants, calls
        gc.collect()
    dist.destroy_process_group()
    return measured


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    began_s = time.perf_counter()
    result = call()
    taken_s = time.perf_counter() - began_s
    dist.barrier()
    del result
    return taken_s


class Variants:
    """The source of a case on this rank, and the variants by name."""

    def __init__(self, case: Case) -> None:
        """Collective: every rank must call it."""
        self._case, self._rank = case, dist.get_rank()
        self._layouts = case.layouts()
        meshes = {mesh: _device_mesh(mesh) for mesh in (case.src[1], case.dst[1])}
        self._src, self._dst = meshes[case.src[1]], meshes[case.dst[1]]
        holds = case.src[1].position(self._rank) is not None
        self._tensors = dict(self._sources()) if holds else {}
        self._remote_specs = {
            name: TensorSpec(src, case.shapes[name], torch.float32)
            for name, (src, _) in self._layouts.items()
        }
        self._amounts = self._exchanged_bytes()
        self.calls: dict[str, Variant] = {
            **self._floors(),
            **self._packed_floors(),
            **self._shared_floors(),
        }
        self._out = self._ours(ExchangeOptions(), None)
        for name, options in WARM_OPTIONS.items():
            self.calls[name] = partial(self._ours, options, self._out)
        for name, options in FRESH_OPTIONS.items():
            self.calls[name] = partial(self._ours, options, None)
        self.unsupported: dict[str, str] = {}
        for name in PLANNERS:
            self._add_dtensor(name)

    def are_right(self) -> dict[str, bool]:
        """Whether each variant except the floor returns the shard of this rank, bit by bit."""
        return {
            name: self._is_right(call)
            for name, call in self.calls.items()
            if not name.startswith("floor")
        }

    def _sources(self) -> Iterator[tuple[str, DTensor]]:
        for name, whole in self._wholes():
            layout = self._layouts[name][0]
            yield name, layout.to_dtensor(_part(whole, layout, self._rank), self._src, whole.shape)

    def _wholes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The global tensors: no two elements of the state have the same bits."""
        first = 0
        for name, shape in self._case.shapes.items():
            numbers = torch.arange(first, first + prod(shape), dtype=torch.int32)
            first += prod(shape)
            yield name, numbers.view(torch.float32).reshape(shape)

    def _ours(self, options: ExchangeOptions, out: dict[str, DTensor] | None) -> dict[str, DTensor]:
        return redistribute_state_dict(
            self._tensors,
            {name: dst for name, (_, dst) in self._layouts.items()},
            meshes=(self._dst,),
            remote_specs=self._remote_specs,
            out=out,
            options=options,
        )

    def _floors(self) -> dict[str, Variant]:
        """Return floors with memory that is reused in each turn, and with new memory in each."""
        sent, received = self._amounts.sent, self._amounts.received
        source = torch.ones(sum(sent), dtype=torch.uint8)
        place = self._case.dst[1].position(self._rank)
        results = [
            torch.ones(dst.local_shape(self._case.shapes[name], self._rank))
            for name, (_, dst) in self._layouts.items()
            if place is not None
        ]

        def floor(target: torch.Tensor, outs: list[torch.Tensor]) -> Any:
            dist.all_to_all_single(target, source, received, sent)
            for out, result in zip(outs, results, strict=True):
                out.copy_(result)
            return target, outs

        def fresh() -> Any:
            return floor(
                torch.empty(sum(received), dtype=torch.uint8), list(map(torch.empty_like, results))
            )

        reused = [torch.ones_like(result) for result in results]
        into = torch.ones(sum(received), dtype=torch.uint8)
        return {"floor": partial(floor, into, reused), "floor fresh": fresh}

    def _packed_floors(self) -> dict[str, Variant]:
        """Return floors by bucket size, with reused memory; and with new memory for the result."""
        sent, received = self._amounts.sent, self._amounts.received
        result_bytes = self._amounts.result
        source = torch.ones(sum(sent), dtype=torch.uint8)
        kept = torch.ones(max(0, result_bytes - sum(received)), dtype=torch.uint8)
        most = _largest(sum(sent) + sum(received))

        def floor(bucket_bytes: int, result: torch.Tensor) -> torch.Tensor:
            count = max(1, -(-most // bucket_bytes))
            first_in = first_out = 0
            for bucket in range(count):
                outs, ins = (
                    [n * (bucket + 1) // count - n * bucket // count for n in counts]
                    for counts in (sent, received)
                )
                packed = source[first_out : first_out + sum(outs)].clone()
                arrived = torch.empty(sum(ins), dtype=torch.uint8)
                dist.all_to_all_single(arrived, packed, ins, outs)
                result[first_in : first_in + sum(ins)] = arrived
                first_in, first_out = first_in + sum(ins), first_out + sum(outs)
            result[first_in : first_in + len(kept)] = kept
            return result

        # A reduction receives more than its result.
        size = max(result_bytes, sum(received))
        reused = torch.ones(size, dtype=torch.uint8)
        return {
            **{f"floor packed {size}": partial(floor, size * MB, reused) for size in (4, 25)},
            "floor packed fresh": lambda: floor(25 * MB, torch.empty(size, dtype=torch.uint8)),
        }

    def _shared_floors(self) -> dict[str, Variant]:
        """Return floors by bucket size, with reused memory; and with new memory for the result."""
        amounts, size = self._amounts, dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        most = _largest(amounts.written)
        memory = SharedMemory(group, 2 * max(min(most, 4 * MB), 1 << 12))
        assert memory.covers_all, memory.problem
        source = np.ones(amounts.written, np.uint8)
        # All ranks read from the one that follows them: how many they are does not matter.
        peers = [rank for rank in range(size) if rank != self._rank]
        peer = memory.region((self._rank + 1) % size)
        own = memory.region(self._rank)

        def floor(bucket_bytes: int, result: np.ndarray, copied: int) -> np.ndarray:
            count = max(1, -(-most // min(bucket_bytes, memory.slot_bytes)))
            first, memory.count = memory.count, memory.count + count
            length = -(-amounts.written // count)
            to_read = -(-sum(amounts.received) // count)
            for index in range(count + 1):
                if index < count:
                    start = (first + index) % 2 * memory.slot_bytes
                    memory.wait_read(peers, first + index - 2)
                    part = source[index * length : (index + 1) * length]
                    own[start : start + len(part)] = part
                    memory.signal_written(first + index)
                if index > 0:
                    bucket = first + index - 1
                    memory.wait_written(peers, bucket)
                    start = bucket % 2 * memory.slot_bytes
                    part = result[(index - 1) * to_read : index * to_read]
                    _copy_around(part, peer[start : start + memory.slot_bytes])
                    memory.signal_read(bucket)
            kept = result[sum(amounts.received) : sum(amounts.received) + copied]
            _copy_around(kept, source if len(source) else own)
            return result

        reused = np.ones(max(amounts.result, sum(amounts.received)), np.uint8)
        return {
            **{
                f"floor shared {megabytes}": partial(
                    floor, megabytes * MB, reused, amounts.moved_inside
                )
                for megabytes in (1, 4)
            },
            "floor shared fresh": lambda: floor(
                4 * MB, np.empty_like(reused), amounts.result - sum(amounts.received)
            ),
        }

    def _exchanged_bytes(self) -> "_Amounts":
        sent, received = ([0] * dist.get_world_size() for _ in range(2))
        written = result = moved_inside = 0
        itemsize = torch.float32.itemsize
        for name, (src, dst) in self._layouts.items():
            planned = plan(src, dst, self._case.shapes[name], torch.float32)
            for part in planned.transfers(self._rank):
                for pieces, counts in ((part.sends, sent), (part.receives, received)):
                    for piece in pieces:
                        assert isinstance(piece.peer, int)
                        counts[piece.peer] += (piece.stop - piece.start) * itemsize
                different = {piece[1:] for piece in part.sends}
                written += sum(stop - start for _, start, stop in different) * itemsize
                if not planned.keeps_shard(self._rank):
                    moved_inside += (
                        sum(dim_slice.stop - dim_slice.start for dim_slice in part.copies)
                        * itemsize
                    )
            if self._case.dst[1].position(self._rank) is not None:
                shape = dst.local_shape(self._case.shapes[name], self._rank)
                result += prod(shape) * itemsize
        return _Amounts(sent, received, written, result, moved_inside)

    def _add_dtensor(self, name: str) -> None:
        """Add DTensor as a variant, or record why it does not support the case."""
        variant = f"DTensor {name}"
        try:
            self._dtensor(name)
        except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
            self.unsupported[variant] = str(error).partition("\n")[0] or type(error).__name__
            return
        self.calls[variant] = partial(self._dtensor, name)

    def _dtensor(self, name: str) -> dict[str, DTensor]:
        if self._src is not self._dst:
            raise NotImplementedError("the destination is on another mesh")
        with planner(name):
            return {
                key: tensor.redistribute(self._dst, self._layouts[key][1].dtensor_placements)
                for key, tensor in self._tensors.items()
            }

    def _is_right(self, call: Variant) -> bool:
        owned = {tensor.to_local().data_ptr() for tensor in self._tensors.values()}
        for tensor in self._out.values():
            if tensor.to_local().data_ptr() not in owned:
                tensor.to_local().fill_(-1)
        moved = call()
        if self._case.dst[1].position(self._rank) is None:
            return True
        return all(
            _is_same(moved[name].to_local(), _part(whole, self._layouts[name][1], self._rank))
            for name, whole in self._wholes()
        )


class _Amounts(NamedTuple):
    """Bytes of this rank."""

    sent: list[int]
    """Bytes sent to each rank."""
    received: list[int]
    """Bytes received from each rank."""
    written: int
    """Sent ones, once however many receive them."""
    result: int
    """Bytes of its shards of the destination."""
    moved_inside: int
    """Bytes of those that it copies from its shards of the source to another place."""


def _largest(number: int) -> int:
    """Return the largest number of all ranks."""
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _copy_around(into: np.ndarray, source: np.ndarray) -> None:
    """Fill an array from the start of another one, again and again."""
    for start in range(0, len(into), len(source)):
        part = into[start : start + len(source)]
        part[...] = source[: len(part)]


def _device_mesh(mesh: HolderMesh) -> DeviceMesh:
    return DeviceMesh(
        "cpu", torch.tensor(mesh.holders).reshape(mesh.shape), mesh_dim_names=mesh.axes
    )


def _part(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    (box,) = layout.boxes(whole.shape, rank)
    index = tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))
    return whole[index].clone(memory_format=torch.contiguous_format)


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.int32), second.view(torch.int32))


@contextmanager
def planner(name: str) -> Iterator[None]:
    """Let DTensor plan with one of PLANNERS."""
    module: Any = _redistribute
    before = module._gen_transform_infos
    module._gen_transform_infos = _dtensor_caches[name]
    try:
        if name == "default":
            yield
        else:
            with _redistribute.use_min_cost_redistribution_plan():
                yield
    finally:
        module._gen_transform_infos = before
