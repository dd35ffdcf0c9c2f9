"""Carries plans out on the ranks of a process group: the one place that moves state.

CPU ranks of one machine exchange through shared memory, all others by collectives of the group.
Layer: above shared_path and collective_path.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
import torch.distributed as dist

from torchtitan_lite.errors import RedistributionError
from torchtitan_lite.redistribute.collective_path import BoundCollectivePath, CollectivePath
from torchtitan_lite.redistribute.means import Means
from torchtitan_lite.redistribute.program import Slices, Task, slices
from torchtitan_lite.redistribute.shared_memory import SharedMemory, is_supported
from torchtitan_lite.redistribute.shared_path import BoundSharedPath, SharedPath
from torchtitan_lite.redistribute.words import (
    WordArray,
    is_viewed_as_words,
    nothing,
    word_array,
    word_tensor,
)

_SLOT_BYTES = 4 << 20
"""Of shared memory. Slots that stay in a processor's cache are read faster than larger ones."""

_Addresses = tuple[tuple[int, tuple[int, ...]] | None, ...]
"""Address and strides of each tensor."""


class Execution:
    """Some tasks, joined into one exchange and made ready to run any number of times."""

    def __init__(
        self,
        tasks: Sequence[Task],
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
        means: Means,
    ) -> None:
        """`tasks` are this rank's, of one width. `ranks` are all that take part, in the order of
        their `group` (None: this rank is alone). Every one of them must come to it."""
        self._tasks = tasks
        self._width = tasks[0].width
        self._copies = [
            (index, slices(block.dst, block.shape), slices(block.src, block.shape))
            for index, task in enumerate(self._tasks)
            for part in task.parts
            for piece in part.copies
            for block in task.blocks(piece, 0)
        ]
        self._fills = [
            (index, fills) for index, task in enumerate(self._tasks) if (fills := _fills(task))
        ]
        self._scaled = [index for index, task in enumerate(tasks) if task.plan.factor != 1]
        self._paths: list[SharedPath | CollectivePath] = []
        if group is not None:
            self._choose_paths(ranks, group, device, means)
        self._bound: _Bound | None = None
        self._on_cpu = device.type == "cpu"

    @torch.no_grad()
    def run(
        self, sources: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor | None]
    ) -> None:
        """Fill `outs`, this rank's parts of the destinations, from `sources`, the parts of the
        sources that it gives, task by task; `outs` contiguous, None where it has none. Every rank
        must call it."""
        where = tuple(
            None if tensor is None else (tensor.data_ptr(), tensor.stride())
            for tensor in (*sources, *outs)
        )
        copied = [
            tensor
            if tensor is None or is_viewed_as_words(tensor, self._width)
            else tensor.contiguous()
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
        for path in bound.paths:
            path.run()
        for index in self._scaled:
            out = outs[index]
            if out is not None:
                _scale_(out, self._tasks[index].plan.factor)

    def _bind(
        self,
        where: _Addresses,
        sources: Sequence[torch.Tensor | None],
        outs: Sequence[torch.Tensor | None],
    ) -> "_Bound":
        given: list[WordArray] = [
            None if tensor is None else word_array(tensor, self._width) for tensor in sources
        ]
        into: list[WordArray] = [
            None if tensor is None else word_array(tensor, self._width) for tensor in outs
        ]
        copies = [(into[index][dst], given[index][src]) for index, dst, src in self._copies]
        return _Bound(where, copies, [path.bind(given, into) for path in self._paths])

    def _choose_paths(
        self, ranks: Sequence[int], group: dist.ProcessGroup, device: torch.device, means: Means
    ) -> None:
        """The ways that the rounds take, one after the other."""
        memory = None
        if device.type == "cpu" and means.transport != "collective" and is_supported():
            memory = shared_memory_of(group)
        nodes = means.costs_on(device).nodes()
        one_node = nodes is None or len({nodes.of(rank) for rank in ranks}) == 1
        covers_all = memory is not None and memory.covers_all and one_node
        near = frozenset(
            number
            for number in (memory.neighbours if memory else ())
            if nodes is None or nodes.of(ranks[number]) == nodes.of(dist.get_rank())
        )
        if means.transport == "shared_memory" and not covers_all:
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
        for number in range(max((len(task.plan.rounds) for task in self._tasks), default=0)):
            # A rank that shares memory with none, such as one that has too little, does all by
            # the group.
            if memory is not None and len(near) > 1:
                most = means.bucket_bytes
                self._paths.append(
                    SharedPath(self._tasks, number, ranks, memory, most, near, scales=scales)
                )
            if not covers_all:
                bucket = means.bucket_bytes // (1 if memory is None else 2)
                self._paths.append(
                    CollectivePath(
                        self._tasks, number, ranks, group, bucket, device, near, scales=scales
                    )
                )

    def _fill(self, index: int, out: torch.Tensor, fills: Sequence[Slices]) -> None:
        """Begin with what changes nothing when others are joined to it."""
        plan = self._tasks[index].plan
        words = word_tensor(out, self._width)
        for place in fills:
            words[place].view(plan.dtype).fill_(nothing(plan.dtype, plan.op))


@dataclass(frozen=True)
class _Bound:
    """All copies for certain tensors. They are remembered by address, which costs less than to
    make the copies anew, and keep no tensor alive."""

    where: _Addresses
    copies: list[tuple[WordArray, WordArray]]
    paths: list[BoundSharedPath | BoundCollectivePath]


@cache
def shared_memory_of(group: dist.ProcessGroup) -> SharedMemory:
    """The memory that the ranks of a group share, made at its first use. Every rank of the group
    must come to it."""
    return SharedMemory(group, 2 * _SLOT_BYTES)


def _fills(task: Task) -> list[Slices]:
    """Where a result begins as nothing: everywhere if it is one contribution of several that gets
    nothing elsewhere, or is reduced."""
    exchange = task.plan.exchange
    if exchange.dst.num_contributions > 1:
        pieces = [piece for part in task.parts for piece in (*part.copies, *part.receives)]
        filled = sum(piece.stop - piece.start for piece in pieces)
        if exchange.rounds[0] == "move" and filled == prod(task.plan.local_shape(task.me)):
            return []
        return [(...,)]  # pyright: ignore[reportReturnType]
    return [
        slices(block.dst, block.shape)
        for part in task.parts
        for piece in part.fills
        for block in task.blocks(piece, 0)
    ]


def _scale_(out: torch.Tensor, factor: float) -> None:
    if out.dtype.itemsize == 1:
        out.copy_(out.float() * factor)
    else:
        out.mul_(factor)
