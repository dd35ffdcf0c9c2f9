"""A Hugging Face folder as a saved state: weights, held by blocks of rows in its files.

Invariant: every byte of a parameter belongs to one holder, and holders follow each other along dim
0. Layer: above pieces.
"""

import errno
from math import prod

import torch

from torchtitan_lite.checkpoint.damage import unreadable
from torchtitan_lite.checkpoint.hugging_face.folder import HuggingFaceFolder
from torchtitan_lite.checkpoint.hugging_face.pieces import Piece, Source, find_pieces
from torchtitan_lite.checkpoint.model_shapes import expected_shapes
from torchtitan_lite.checkpoint.snapshots import SavedValues
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.checkpoint.tensor_bytes import as_tensor, bytes_of
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.redistribute import Layout, Placed
from torchtitan_lite.redistribute.holder_mesh import Holder
from torchtitan_lite.spec import ModelSpec

_SMALL_BYTES = 1 << 20
"""A tensor up to this size is one block."""
_NOWHERE: Holder = "nowhere"
"""Holds what does not exist in such folders, and is zero."""


class HuggingFaceSnapshot:
    """Weights alone, of step 0."""

    def __init__(
        self,
        storage: Storage,
        name: str,
        spec: ModelSpec,
        *,
        num_blocks: int = 1,
        block_bytes: int | None = None,
    ) -> None:
        """A parameter has at least `num_blocks` holders, so that as many ranks read a part of it;
        or as many as keep a block below `block_bytes`.

        Raises CheckpointError where the folder is of another model than `spec`, and what
        `HuggingFaceFolder` raises.
        """
        if spec.hugging_face is None:
            raise CheckpointError(
                f"{spec.name} {spec.flavor} is no model of transformers, so {storage.root}/{name} "
                "cannot be loaded into it. Choose another model.name or model.flavor."
            )
        self.folder = folder = HuggingFaceFolder(storage, name)
        self.where = folder.where
        if differences := spec.hugging_face.differences(folder.config):
            raise CheckpointError(
                f"{self.where} is another model than {spec.name} {spec.flavor}: "
                f'{"; ".join(differences)}. Set model.flavor = "hf" and model.hf_assets_path to '
                "the folder, which takes the model from there."
            )
        self._storage = storage
        parameters, buffers = expected_shapes(spec)
        sources = find_pieces(folder, spec, parameters | buffers)
        self._sources = {f"model.{name}": source for name, source in sources.items()}
        self.tensors: dict[str, Placed] = {}
        self._pieces: dict[tuple[str, Holder], Piece] = {}
        for name, source in self._sources.items():
            num_bytes = prod(source.shape) * source.dtype.itemsize
            wanted = num_blocks if num_bytes > _SMALL_BYTES else 1
            if block_bytes is not None:
                wanted = max(wanted, -(-num_bytes // block_bytes))
            layout, owners = _cut(source, wanted)
            self.tensors[name] = Placed(layout, source.shape, source.dtype)
            self._pieces |= {(name, holder): piece for holder, piece in owners.items()}
        self.saved = SavedValues(0, {}, {}, {}, model_only=True)

    def is_weight(self, name: str) -> bool:
        """Whether a tensor is stored there, and is no buffer of ours that is zero."""
        return bool(self._sources[name].pieces)

    def reach(self, holder: Holder) -> None:
        """All see the storage."""
        return None

    def part(self, name: str, holder: Holder) -> torch.Tensor:
        placed = self.tensors[name]
        shape = placed.layout.local_shape(placed.shape, holder)
        if holder == _NOWHERE or 0 in shape:
            return torch.zeros(shape, dtype=placed.dtype)
        file, first, end = self._place(name, holder)
        try:
            raw = self._storage.read(self.folder.path(file), first, end)
        except OSError as error:
            raise self._unreadable(file, error) from None
        if len(raw) != end - first:
            raise self._unreadable(file, OSError(errno.ENODATA, f"it ends before byte {end}"))
        return as_tensor(raw, placed.dtype, shape)

    def read_part(self, name: str, holder: Holder, into: torch.Tensor) -> None:
        if holder == _NOWHERE or into.numel() == 0:
            into.zero_()
            return
        file, first, _ = self._place(name, holder)
        try:
            self._storage.read_into(self.folder.path(file), first, bytes_of(into), _unseen)
        except OSError as error:
            raise self._unreadable(file, error) from None

    def _place(self, name: str, holder: Holder) -> tuple[str, int, int]:
        """The bytes of a file that a holder stands for."""
        placed, piece = self.tensors[name], self._pieces[name, holder]
        (box,) = placed.layout.boxes(placed.shape, holder)
        # Rows are counted from the beginning of the piece, which is whole rows itself.
        dim = 0 if len(self._sources[name].pieces) == 1 else 1
        row_bytes = prod(placed.shape[dim + 1 :]) * placed.dtype.itemsize
        first = piece.first + box.offset[dim] * row_bytes
        return piece.file, first, first + prod(box.size) * placed.dtype.itemsize

    def _unreadable(self, file: str, error: OSError) -> CheckpointError:
        return unreadable(f"{self.where}/{file} cannot be read", error)


def _cut(source: Source, num_blocks: int) -> tuple[Layout, dict[Holder, Piece]]:
    """Pieces are cut along dim 0 between them, and each along its own rows."""
    pieces = source.pieces
    if not pieces:
        return Layout.alone(_NOWHERE), {}
    if len(pieces) == 1:
        owners = {_holder(pieces[0], block): pieces[0] for block in range(num_blocks)}
        return Layout.cut_by_dims((num_blocks,), tuple(owners)), owners
    each = -(-num_blocks // len(pieces))
    owners = {_holder(piece, block): piece for piece in pieces for block in range(each)}
    return Layout.cut_by_dims((len(pieces), each), tuple(owners)), owners


def _holder(piece: Piece, block: int) -> Holder:
    return f"{piece.key} from byte {piece.first}, block {block}"


def _unseen(content: memoryview) -> None:
    """There are no checksums to compute."""
