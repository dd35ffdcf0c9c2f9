"""A move through collectives needs no more temporary memory than its buckets allow."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import WorkerPool
from tests.redistribution.processes import device_mesh
from torchtitan_lite.debug.memory import LiveTensors
from torchtitan_lite.redistribute import (
    ExchangeOptions,
    HolderMesh,
    Layout,
    redistribute_state_dict,
)

Pools = Callable[[int], WorkerPool]

MESH = HolderMesh.ranks(4)
MIB = 1 << 20
SLACK_BYTES = 1 << 12
"""Loads and other numbers on which the ranks agree: a few words for each tensor."""


@pytest.mark.parametrize("bucket_mib", [1, 4, 25])
@pytest.mark.parametrize(
    ("src", "dst", "is_transposed"),
    [
        (Shard(0), Replicate(), False),
        (Shard(0), Shard(1), False),
        (Partial(), Shard(0), False),
        (Shard(0), Replicate(), True),
    ],
    ids=["gather", "transpose", "reduce", "of transposed memory"],
)
def test_temporary_memory_is_at_most_two_buckets(
    src: Placement, dst: Placement, is_transposed: bool, bucket_mib: int, pools: Pools
) -> None:
    bucket_bytes = bucket_mib * MIB
    for extra in pools(4).run(_extra_bytes, src, dst, bucket_bytes, is_transposed):
        # More than one bucket was needed: the move is larger than that.
        assert bucket_bytes < extra <= 2 * bucket_bytes + SLACK_BYTES


def _extra_bytes(src: Placement, dst: Placement, bucket_bytes: int, is_transposed: bool) -> int:
    """The peak of what lives beside the sources and the destinations."""
    # What a rank sends and receives of all is three buckets or more.
    rows = bucket_bytes // 1024 * (8 if isinstance(dst, Shard) and isinstance(src, Shard) else 2)
    names = [f"weight {number}" for number in range(3)]
    shape = (rows // 3, 256)
    sources = {name: _empty(Layout(MESH, [src]), shape, is_transposed) for name in names}
    outs = {name: _empty(Layout(MESH, [dst]), shape) for name in names}
    layouts = {name: Layout(MESH, [dst]) for name in names}
    options = ExchangeOptions(bucket_bytes=bucket_bytes, transport="collective")
    with _Watch([*sources.values(), *outs.values()]) as watch:
        redistribute_state_dict(sources, layouts, out=outs, options=options)
    return watch.live.take_peak() - watch.before


def _empty(layout: Layout, shape: tuple[int, ...], is_transposed: bool = False) -> DTensor:
    own = layout.local_shape(shape, dist.get_rank())
    local = torch.zeros(own[::-1]).t() if is_transposed else torch.zeros(own)
    return layout.to_dtensor(local, device_mesh(MESH), shape)


class _Watch(TorchDispatchMode):
    """Notes what every operation returns, but for views of `tensors` by numpy, which are storages
    of their own."""

    def __init__(self, tensors: Sequence[DTensor]) -> None:
        super().__init__()
        locals_ = [tensor.to_local() for tensor in tensors]
        self._known = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in locals_]
        self.live = LiveTensors(tensors)
        self.before = self.live.take_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (isinstance(result, torch.Tensor) and self._is_known(result)):
            self.live.note(result)
        return result

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, DTensor):
            return False
        return any(start <= tensor.data_ptr() < stop for start, stop in self._known)
