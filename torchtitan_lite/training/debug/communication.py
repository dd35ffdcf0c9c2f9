"""Communication of an operation: its collective, the mesh axes it runs over, and its bytes.

Every collective is an operation that takes a process group: c10d operations from FSDP2 and
`torch.distributed`, functional collectives from DTensor. So no list of callers is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import tensors_in

_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_base": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}
"""Common names of the operations of c10d, functional collectives and DTensor."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective, as seen by this rank."""

    order: int
    operation: str
    axis: str
    """Axes of the mesh, joined by "+", or "world"."""
    num_bytes: int
    """The larger of input and output: the entire tensor of a gather or scatter."""
    dtype: str
    module: str
    phase: str
    """forward, backward (including recomputed activations), other (between pipeline stages) or step
    (agreement of the ranks, and the optimizer)."""


def name_of(operation: Any) -> str:
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv, ..."""
    plain: str = operation.name().partition("::")[2].strip("_").removesuffix("_coalesced")
    return _OPERATIONS.get(plain, plain)


def size_of(args: Sequence[Any], result: Any) -> tuple[int, str]:
    """Return the bytes and the dtype of the largest argument or result; a list of tensors is one
    argument."""
    size, dtype = 0, "none"
    results = result if isinstance(result, tuple) else (result,)
    for value in (*args, *results):
        tensors = tensors_in(value)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if num_bytes > size:
            size, dtype = num_bytes, str(tensors[0].dtype).removeprefix("torch.")
    return size, dtype


class AxisNames:
    """Names process groups by their mesh axes; others by the axes along which their ranks
    differ."""

    def __init__(self, mesh: Mesh) -> None:
        device_mesh = mesh.device_mesh
        self._axes: tuple[str, ...] = device_mesh.mesh_dim_names or ()
        ranks = device_mesh.mesh.flatten().tolist()
        places = [index.tolist() for index in torch.where(device_mesh.mesh >= 0)]
        self._places = dict(zip(ranks, zip(*places, strict=True), strict=True))
        self._world = dist.group.WORLD
        self._groups = mesh.groups

    def of(self, group: dist.ProcessGroup, operation: Any, phase: str) -> str:
        """Return the axes that an operation over `group` runs over."""
        # An axis with all ranks is the same group as the world. The training step uses the world's
        # group; DTensor uses functional collectives over the axis.
        if group == self._world and phase == "step" and operation.namespace == "c10d":
            return "world"
        name = self._groups.name_of(group)
        if name:
            return name
        places = [self._places[rank] for rank in dist.get_process_group_ranks(group)]
        differing = [
            axis
            for axis, along in zip(self._axes, zip(*places, strict=True), strict=True)
            if len(set(along)) > 1
        ]
        return "+".join(differing) or "one rank"
