"""What travels: which collective an operation is, over which axes of the mesh, and how much it
moves.

Whoever communicates does so by an operation that is given a process group: FSDP2 and
`torch.distributed` by those of c10d, DTensor by the functional ones. So no list of callers is kept.
Layer: above mesh and torch_compat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lite.mesh import Mesh
from torchtitan_lite.torch_compat import tensors_in

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
"""One name for what c10d, the functional collectives and DTensor call differently."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective, as this rank saw it."""

    order: int
    operation: str
    axis: str
    """Axes of the mesh, joined by "+", or "world"."""
    num_bytes: int
    """Of the larger of what went in and what came out: the whole tensor of a gather or a
    scatter."""
    dtype: str
    module: str
    phase: str
    """forward, backward (activations that are computed again included), other (between stages of
    a pipeline) or step (agreement of the ranks and the optimizer)."""


def name_of(operation: Any) -> str:
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv, ..."""
    plain: str = operation.name().partition("::")[2].strip("_").removesuffix("_coalesced")
    return _OPERATIONS.get(plain, plain)


def size_of(args: Sequence[Any], result: Any) -> tuple[int, str]:
    """The bytes and the dtype of the largest of the arguments and results; a list of tensors is
    one argument."""
    size, dtype = 0, "none"
    results = result if isinstance(result, tuple) else (result,)
    for value in (*args, *results):
        tensors = tensors_in(value)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if num_bytes > size:
            size, dtype = num_bytes, str(tensors[0].dtype).removeprefix("torch.")
    return size, dtype


class AxisNames:
    """Names process groups by the axes that the mesh made them for; others by the axes along which
    their ranks differ."""

    def __init__(self, mesh: Mesh) -> None:
        device_mesh = mesh.device_mesh
        self._axes: tuple[str, ...] = device_mesh.mesh_dim_names or ()
        ranks = device_mesh.mesh.flatten().tolist()
        places = [index.tolist() for index in torch.where(device_mesh.mesh >= 0)]
        self._places = dict(zip(ranks, zip(*places, strict=True), strict=True))
        self._world = dist.group.WORLD
        self._groups = mesh.groups

    def of(self, group: dist.ProcessGroup, operation: Any, phase: str) -> str:
        """The axes that an operation over `group` runs over."""
        # An axis that has all the ranks is the same group as the world. What the step itself
        # agrees on is for the world; DTensor, which means the axis, uses functional collectives.
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
