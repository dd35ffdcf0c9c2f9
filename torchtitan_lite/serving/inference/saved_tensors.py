"""The tensors of a saved state, each read when asked for: whole, a part, or onto a mesh."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from torchtitan_lite.checkpoint import Snapshot, load_some, newest_step, read_tensor
from torchtitan_lite.core.errors import CheckpointError, MeshError, UserError
from torchtitan_lite.distributed.host_collectives import all_gather_bytes
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout
from torchtitan_lite.serving.inference.weights import open_saved

Index = int | slice | tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor in files."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str
    """Folder or URL of its checkpoint."""
    _snapshot: Snapshot = field(repr=False, compare=False)

    def read(self) -> torch.Tensor:
        """Read all of it, onto the CPU. Not collective. Raises DamagedCheckpoint if a checksum does
        not match, and CheckpointError if it cannot be read now."""
        return read_tensor(self._snapshot, self.name)

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read a part, onto the CPU: `tensor[:10]`, `tensor[3, 8:16]`. Only the blocks of the files
        that it touches are read. Not collective. Raises IndexError for an index out of range,
        UserError for one that is not of integers and slices of step 1, and as `read`."""
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) > len(self.shape):
            raise IndexError(f"{self.name} has shape {self.shape}: {len(indices)} indices given.")
        slices = [
            _contiguous(self.name, dim_index, size)
            for dim_index, size in zip(indices, self.shape, strict=False)
        ]
        slices += [slice(0, size) for size in self.shape[len(indices) :]]
        part = read_tensor(self._snapshot, self.name, slices)
        return part[
            tuple(0 if isinstance(dim_index, int) else slice(None) for dim_index in indices)
        ]

    def distribute(self, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        """Read it as a DTensor, with a placement for each axis of `device_mesh`, which has all
        ranks. Every rank must call it. Each byte of the files is read by one rank, and sent to the
        others that need it; `to_local` of the result is this rank's shard.

        Raises MeshError if the mesh does not have all ranks, LayoutError for placements that do not
        fit, CheckpointError if ranks opened different checkpoints, and as `read`, on all ranks."""
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if not dist.is_initialized() or device_mesh.size() != num_ranks:
            raise MeshError(
                f"{self.name}: the mesh has {device_mesh.size()} ranks, but there are {num_ranks}. "
                "Give a mesh of all ranks; an axis along which they hold the same is Replicate()."
            )
        opened = sorted({where.decode() for where in all_gather_bytes(self.where.encode())})
        if len(opened) > 1:
            raise CheckpointError(
                f"{self.name}: ranks opened different checkpoints, {' and '.join(opened)}. Name "
                "the folder of a step."
            )
        layout = Layout(HolderMesh.from_device_mesh(device_mesh), placements)
        layout = layout.with_num_dims(len(self.shape))
        shape = layout.local_shape(self.shape, dist.get_rank())
        local = torch.empty(shape, dtype=self.dtype, device=device_mesh.device_type)
        tensor = layout.to_dtensor(local, device_mesh, self.shape)
        load_some(self._snapshot, {self.name: tensor})
        return tensor


def saved_tensors(path: str | os.PathLike[str], *, ema: bool = False) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint by name, without reading them: `model.*` and, where saved,
    `optimizer.*`.

    `path` is as for `load_model`. The tensors of a Hugging Face folder have the names that they
    have here. With `ema`, the moving averages of the weights are in their place. Not collective.
    Raises CheckpointError if `path` holds no readable checkpoint.
    """
    try:
        folder = newest_step(os.fspath(path))
        snapshot = open_saved(folder, ema=ema)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return {
        name: SavedTensor(
            name=name,
            shape=tuple(placed.shape),
            dtype=placed.dtype,
            where=snapshot.where,
            _snapshot=snapshot,
        )
        for name, placed in sorted(snapshot.tensors.items())
    }


def _contiguous(name: str, index: int | slice, size: int) -> slice:
    """Return the range of an index in a dim of `size` elements."""
    if isinstance(index, slice) and index.step in (None, 1):
        start, stop, _ = index.indices(size)
        return slice(start, max(start, stop))
    if type(index) is not int:
        raise UserError(
            f"{name}[{index}] cannot be read: give integers and slices of step 1, such as "
            "tensor[0, 8:16], or index the result of read()."
        )
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for a dim of {name} with {size} elements.")
    return slice(index % size, index % size + 1)
