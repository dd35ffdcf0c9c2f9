"""Execution of plans on the ranks of a process group.

All tensors of a call move in one fused exchange: CPU ranks of one machine exchange through shared
memory, all others by collectives of the group.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchtitan_lite.core.errors import LayoutError, RedistributionError
from torchtitan_lite.distributed.axis_groups import group_of_ranks
from torchtitan_lite.distributed.redistribute.execution.collective_transport import (
    BoundCollectiveTransport,
    CollectiveTransport,
)
from torchtitan_lite.distributed.redistribute.execution.program import (
    RawArray,
    Slices,
    TensorTask,
    has_raw_view,
    identity_element,
    raw_array,
    raw_itemsize,
    raw_tensor,
    slices,
)
from torchtitan_lite.distributed.redistribute.execution.shared_memory import (
    SharedMemory,
    is_supported,
)
from torchtitan_lite.distributed.redistribute.execution.shared_memory_transport import (
    BoundSharedMemoryTransport,
    SharedMemoryTransport,
)
from torchtitan_lite.distributed.redistribute.planning.cost import ExchangeOptions
from torchtitan_lite.distributed.redistribute.planning.layout import Layout
from torchtitan_lite.distributed.redistribute.planning.placements import HolderMesh, decode_strided
from torchtitan_lite.distributed.redistribute.planning.plan import Plan
from torchtitan_lite.distributed.torch_compat import DTensorSpec

_GROUP_TIMEOUT = timedelta(minutes=5)

_SLOT_BYTES = 4 << 20
"""Slot size of shared memory. Slots that stay in a processor's cache are read faster than larger
ones."""

_Addresses = tuple[tuple[int, tuple[int, ...]] | None, ...]
"""Address and strides per tensor."""


def execute_exchange(
    plans: Sequence[Plan],
    sources: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor | None],
    device: torch.device,
    options: ExchangeOptions,
) -> list[torch.Tensor]:
    """Execute plans in one fused exchange, on this rank's shards of the sources in the order of
    `plans`, which is equal on all ranks. Returns its shards of the destinations.

    Tensors in `outs` are filled; without them an unchanged shard may be the source itself. A rank
    without a shard gets empty tensors. Every rank of the plans must call it; others return at once.
    Raises LayoutError for a source whose shard has another shape than in its layout, and
    RedistributionError for an unsuitable `out`.
    """
    rank = dist.get_rank()
    plans = tuple(plans)
    work = _work(plans, rank)
    results: list[torch.Tensor] = []
    for plan, source, shape in zip(plans, sources, work.source_shapes, strict=True):
        if source is not None and shape is not None:
            check_source(plan, source, shape)
    for plan, keeps_shard, shape, source, out in zip(
        plans, work.keeps_shard, work.shapes, sources, outs, strict=True
    ):
        if out is not None and plan.dst.mesh.position(rank) is not None:
            _check_part(out, shape, plan)
        if keeps_shard and source is not None:
            results.append(source if out is None else out)
            if out is not None and out.data_ptr() != source.data_ptr():
                out.copy_(source)
        elif out is None:
            results.append(torch.empty(shape, dtype=plan.dtype, device=device))
        else:
            if source is not None and out.numel() and out.data_ptr() == source.data_ptr():
                raise RedistributionError(
                    f"out is the source itself, which is read while {plan.dst} is written. Give "
                    "other memory."
                )
            results.append(out)
    for chosen, indices, ranks in work.exchanges:
        _fused_exchange(chosen, ranks, device, options, dist.group.WORLD).run(
            [_part(sources[n], plans[n].src, rank) for n in indices],
            [None if plans[n].dst.mesh.position(rank) is None else results[n] for n in indices],
        )
    return results


class FusedExchange:
    """Tasks fused into one exchange that can run repeatedly."""

    def __init__(
        self,
        tasks: Sequence[TensorTask],
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
        options: ExchangeOptions,
    ) -> None:
        """`tasks` are this rank's, of one raw width. `ranks` are all participants, in the order of
        their `group` (None: this rank is alone). Every one of them must call it."""
        self._tasks = tasks
        self._width = tasks[0].width
        self._copies = [
            (index, slices(block.dst, block.shape), slices(block.src, block.shape))
            for index, task in enumerate(self._tasks)
            for part in task.transfers
            for piece in part.copies
            for block in task.rectangles(piece, 0)
        ]
        self._fills = [
            (index, fills) for index, task in enumerate(self._tasks) if (fills := _fills(task))
        ]
        self._scaled = [index for index, task in enumerate(tasks) if task.plan.factor != 1]
        self._transports: list[SharedMemoryTransport | CollectiveTransport] = []
        if group is not None:
            self._choose_transports(ranks, group, device, options)
        self._bound: _BoundTensors | None = None
        self._on_cpu = device.type == "cpu"

    @torch.no_grad()
    def run(
        self, sources: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor | None]
    ) -> None:
        """Fill `outs`, this rank's shards of the destinations, from `sources`, its shards of the
        sources, by task; `outs` are contiguous, None if it has none. Every rank must call it."""
        where = tuple(
            None if tensor is None else (tensor.data_ptr(), tensor.stride())
            for tensor in (*sources, *outs)
        )
        copied = [
            tensor if tensor is None or has_raw_view(tensor, self._width) else tensor.contiguous()
            for tensor in sources
        ]
        bound = self._bound
        if bound is None or bound.where != where:
            bound = self._bind(where, copied, outs)
            # Elsewhere than on a CPU it would keep the tensors alive; copies do not live on.
            is_kept = self._on_cpu and all(map(operator.is_, copied, sources))
            self._bound = bound if is_kept else None
        for index, fills in self._fills:
            out = outs[index]
            if out is not None:
                self._fill(index, out, fills)
        for array, source in bound.copies:
            array[...] = source
        for transport in bound.transports:
            transport.run()
        for index in self._scaled:
            out = outs[index]
            if out is not None:
                _scale_(out, self._tasks[index].plan.factor)

    def _bind(
        self,
        where: _Addresses,
        sources: Sequence[torch.Tensor | None],
        outs: Sequence[torch.Tensor | None],
    ) -> "_BoundTensors":
        src_arrays: list[RawArray] = [
            None if tensor is None else raw_array(tensor, self._width) for tensor in sources
        ]
        into: list[RawArray] = [
            None if tensor is None else raw_array(tensor, self._width) for tensor in outs
        ]
        copies = [(into[index][dst], src_arrays[index][src]) for index, dst, src in self._copies]
        return _BoundTensors(
            where, copies, [transport.bind(src_arrays, into) for transport in self._transports]
        )

    def _choose_transports(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        options: ExchangeOptions,
    ) -> None:
        """Return the transports of the rounds, in order."""
        memory = None
        if device.type == "cpu" and options.transport != "collective" and is_supported():
            memory = shared_memory_for(group)
        nodes = options.costs_on(device).nodes()
        one_node = nodes is None or len({nodes.of(rank) for rank in ranks}) == 1
        covers_all = memory is not None and memory.covers_all and one_node
        near = frozenset(
            group_rank
            for group_rank in (memory.peers if memory else ())
            if nodes is None or nodes.of(ranks[group_rank]) == nodes.of(dist.get_rank())
        )
        if options.transport == "shared_memory" and not covers_all:
            raise RedistributionError(
                f"Ranks {list(ranks)} do not all share memory: "
                + ((memory and memory.problem) or "they are on a GPU or on several machines")
                + ". Leave the transport open."
            )
        # The same on all ranks: all contributions to an element arrive on one path.
        scales = memory is None or covers_all
        if scales:
            self._scaled = [
                n for n in self._scaled if not self._tasks[n].plan.is_scaled_in_reduction
            ]
        for index in range(max((len(task.plan.rounds) for task in self._tasks), default=0)):
            # A rank that shares memory with none, such as one that has too little, does all by
            # the group.
            if memory is not None and len(memory.peers) > 1:
                most = options.bucket_bytes
                self._transports.append(
                    SharedMemoryTransport(
                        self._tasks, index, ranks, memory, most, near, scales=scales
                    )
                )
            if not covers_all:
                bucket = options.bucket_bytes // (1 if memory is None else 2)
                self._transports.append(
                    CollectiveTransport(
                        self._tasks, index, ranks, group, bucket, device, near, scales=scales
                    )
                )

    def _fill(self, index: int, out: torch.Tensor, fills: Sequence[Slices]) -> None:
        """Initialize with the identity of the reduction."""
        plan = self._tasks[index].plan
        words = raw_tensor(out, self._width)
        for place in fills:
            words[place].view(plan.dtype).fill_(identity_element(plan.dtype, plan.op))


def check_source(plan: Plan, part: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise LayoutError if this rank's shard of the source has another shape than in the layout."""
    if part.shape != shape:
        raise LayoutError(
            f"Rank {dist.get_rank()} has a part of shape {tuple(part.shape)}, and {plan.src} of a "
            f"tensor of shape {plan.shape} gives it {shape}. Make the DTensor with the shape of "
            "the whole tensor, or say how its strided shards are read."
        )


@lru_cache(maxsize=8192)
def check_out(
    spec: DTensorSpec, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise RedistributionError if the DTensor `spec` for a result has another layout, shape or
    dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    readings = [Layout.from_spec(spec, strided="stride")]
    if decode_strided(readings[0].mesh, readings[0].placements) is not None:
        readings.append(Layout.from_spec(spec, strided="order"))
    lies_so = layout in readings
    if not lies_so or tuple(meta.shape) != shape or meta.dtype != dtype:
        raise RedistributionError(
            f"out is {spec.placements} on {HolderMesh.from_device_mesh(spec.mesh)}, of shape "
            f"{tuple(meta.shape)}, {meta.dtype}; {layout}, {shape}, {dtype} is needed."
        )


def process_group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the process group of some ranks, created at its first use, which all of them must
    call."""
    world = dist.group.WORLD
    assert world is not None
    ranks = sorted(ranks)
    if len(ranks) == world.size():
        return world
    return group_of_ranks(world, _GROUP_TIMEOUT, *ranks)


@cache
def shared_memory_for(group: dist.ProcessGroup) -> SharedMemory:
    """Return the shared memory of a group, created at its first use. Every rank of the group must
    call it."""
    return SharedMemory(group, 2 * _SLOT_BYTES)


class _Work(NamedTuple):
    """The tasks of a rank for some plans."""

    keeps_shard: list[bool]
    shapes: list[tuple[int, ...]]
    """This rank's shards of the destinations."""
    source_shapes: list[tuple[int, ...] | None]
    """Shard of the source; None if it has none."""
    exchanges: list[tuple[tuple[Plan, ...], list[int], tuple[int, ...]]]
    """Return the plans in which this rank takes part, their indices, and the ranks."""


@lru_cache(maxsize=256)
def _work(plans: tuple[Plan, ...], rank: int) -> _Work:
    keeps_shard = [plan.keeps_shard(rank) for plan in plans]
    near = [n for n, plan in enumerate(plans) if plan.moved_bytes == 0 and not keeps_shard[n]]
    far = [n for n, plan in enumerate(plans) if plan.moved_bytes > 0]
    exchanges = []
    for indices, ranks in ((near, (rank,)), (far, _ranks([plans[n] for n in far]))):
        if indices and rank in ranks:
            exchanges.append((tuple(plans[n] for n in indices), indices, ranks))
    source_shapes = [
        None if plan.src.mesh.position(rank) is None else plan.src.local_shape(plan.shape, rank)
        for plan in plans
    ]
    return _Work(keeps_shard, [plan.local_shape(rank) for plan in plans], source_shapes, exchanges)


def _part(tensor: torch.Tensor | None, layout: Layout, rank: int) -> torch.Tensor | None:
    """Return a shard as memory whose bytes are its elements; its strides are arbitrary."""
    if tensor is None or layout.mesh.position(rank) is None:
        return None
    return tensor.resolve_conj().resolve_neg()


def _check_part(out: torch.Tensor, shape: tuple[int, ...], plan: Plan) -> None:
    if tuple(out.shape) != shape or out.dtype != plan.dtype or not out.is_contiguous():
        raise RedistributionError(
            f"out has a part of shape {tuple(out.shape)}, {out.dtype}"
            f"{'' if out.is_contiguous() else ', not contiguous'}; {plan.dst} of a tensor of shape "
            f"{plan.shape} needs {shape}, {plan.dtype}, contiguous."
        )


def _ranks(plans: Sequence[Plan]) -> tuple[int, ...]:
    """All participating ranks, in order."""
    meshes = {mesh for plan in plans for mesh in (plan.src.mesh, plan.dst.mesh)}
    ranks: set[int] = set()
    for mesh in meshes:
        for holder in mesh.holders:
            if not isinstance(holder, int):
                raise RedistributionError(
                    f"Holder {holder!r} of {mesh} is no rank; only ranks can be moved between here."
                )
            ranks.add(holder)
    return tuple(sorted(ranks))


def fused_exchange(
    plans: Sequence[Plan], ranks: Sequence[int], device: torch.device, options: ExchangeOptions
) -> FusedExchange:
    """Return the exchange of `plans`, each of a single exchange, among `ranks`, to run repeatedly.
    Every one of `ranks` must call it: the first call creates their process group."""
    width = raw_itemsize(plan.dtype for plan in plans)
    tasks = [TensorTask(plan, dist.get_rank(), width) for plan in plans]
    group = process_group_of(ranks) if len(ranks) > 1 else None
    return FusedExchange(tasks, sorted(ranks), group, device, options)


@lru_cache(maxsize=64)
def _fused_exchange(
    plans: tuple[Plan, ...],
    ranks: tuple[int, ...],
    device: torch.device,
    options: ExchangeOptions,
    world: dist.ProcessGroup,
) -> FusedExchange:
    return fused_exchange(plans, ranks, device, options)


@dataclass(frozen=True)
class _BoundTensors:
    """Bound copies for certain tensors, cached by address: that is cheaper than binding them again,
    and does not keep the tensors alive."""

    where: _Addresses
    copies: list[tuple[RawArray, RawArray]]
    transports: list[BoundSharedMemoryTransport | BoundCollectiveTransport]


def _fills(task: TensorTask) -> list[Slices]:
    """Return where a result must be initialized with the identity: everywhere if it is one of
    several partial values without a contribution elsewhere, or is reduced."""
    exchange = task.plan.exchange
    if exchange.dst.num_contributions > 1:
        pieces = [piece for part in task.transfers for piece in (*part.copies, *part.receives)]
        filled = sum(piece.stop - piece.start for piece in pieces)
        if exchange.rounds[0] == "move" and filled == prod(task.plan.local_shape(task.me)):
            return []
        return [(...,)]  # pyright: ignore[reportReturnType]
    return [
        slices(block.dst, block.shape)
        for part in task.transfers
        for piece in part.fills
        for block in task.rectangles(piece, 0)
    ]


def _scale_(out: torch.Tensor, factor: float) -> None:
    if out.dtype.itemsize == 1:
        out.copy_(out.float() * factor)
    else:
        out.mul_(factor)
