"""Move a TrainState to another mesh of the same processes, without files. Layer: beside trainer."""

from collections.abc import Mapping

import torch

from torchtitan_lite.mesh import Mesh
from torchtitan_lite.redistribute import (
    TensorSpec,
    gather_specs,
    match_layouts,
    redistribute_state_dict,
)
from torchtitan_lite.train_state import TrainState, model_tensors


def move_state(
    source: TrainState, source_mesh: Mesh, target: TrainState, target_mesh: Mesh
) -> None:
    """Copy model, optimizer, step and data position from `source` to `target`, which keeps its own
    learning rate schedule. `source` does not change; both are between two steps. Every rank must
    call it. Raises LayoutError if models or kinds of optimizer differ, or if the optimizer of
    `target` has taken steps and that of `source` none."""
    given = gather_mesh_specs(source.tensors(), source_mesh)
    # Reject a different model before allocating anything.
    wanted = gather_mesh_specs(model_tensors(target.model), target_mesh)
    match_layouts(wanted, {name: placed for name, placed in given.items() if name in wanted})
    target.allocate({name: placed.shape for name, placed in given.items()})
    copy_tensors(target.tensors(), target_mesh, source.tensors(), source_mesh)
    target.load_values(source.values())


def copy_tensors(
    target: Mapping[str, torch.Tensor],
    target_mesh: Mesh,
    source: Mapping[str, torch.Tensor],
    source_mesh: Mesh,
) -> None:
    """Copy the tensors of `source` to those of the same names in `target`, in one exchange. Each
    mapping has this rank's tensors or shards; plain tensors are replicated on their stage. Every
    rank must call it. Raises LayoutError if the names, shapes or dtypes of all ranks together
    differ."""
    given, wanted = gather_mesh_specs(source, source_mesh), gather_mesh_specs(target, target_mesh)
    into = {name: target_mesh.to_dtensor(tensor) for name, tensor in target.items()}
    redistribute_state_dict(
        {name: source_mesh.to_dtensor(tensor) for name, tensor in source.items()},
        match_layouts(wanted, given),
        remote_specs=given,
        out=into,
    )
    for name, tensor in target.items():
        # A count of steps may lie on the CPU beside parameters on a GPU.
        if tensor.device != into[name].device:
            tensor.copy_(into[name].to_local())


def gather_mesh_specs(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, TensorSpec]:
    """Return the specs of all ranks of a mesh, by name, given this rank's tensors. Every rank must
    call it."""
    return gather_specs({name: mesh.to_dtensor(tensor) for name, tensor in tensors.items()})
