"""An export of tensors to a folder of safetensors files, one tensor at a time in memory, and
resumable by file.

Invariant: the folder appears under its name once it is complete.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from torchtitan_lite.checkpoint.convert.conversion import Tick, run_workers
from torchtitan_lite.checkpoint.convert.hugging_face.earlier_releases import (
    TOKENIZER_CONFIG,
    rewrite_tokenizer_config,
)
from torchtitan_lite.checkpoint.convert.hugging_face.folder import check_assets, copy_assets
from torchtitan_lite.checkpoint.convert.hugging_face.partial_folder import (
    PartialFolder,
    check_absent,
)
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.safetensors_file import (
    PartBox,
    no_tick,
    safetensors_header,
    tensor_names,
    write_safetensors,
)
from torchtitan_lite.checkpoint.tensors import DTYPE_NAMES, cast_pieces
from torchtitan_lite.core.errors import CheckpointError

_METADATA = {"format": "pt"}
"""transformers rejects files without it."""


@dataclass(frozen=True)
class ExportTensor:
    """A tensor of the exported folder."""

    key: str
    name: str
    """Name of the parameter in the checkpoint."""
    row: int | None
    """Index of its row along dim 0; None for the whole parameter."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False
    """Whether the last two dims of the parameter are swapped."""
    fused_with: tuple[str, ...] = ()
    """Names of parameters that follow it along `fused_dim`, before that."""
    fused_dim: int = -2

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExportFile:
    """A file of the exported folder."""

    file: str
    units: tuple[ExportTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(unit.num_bytes for unit in self.units)

    @property
    def boxes(self) -> list[PartBox]:
        return [
            PartBox(unit.key, DTYPE_NAMES[unit.dtype], unit.shape, 0, unit.num_bytes)
            for unit in self.units
        ]

    @property
    def length(self) -> int:
        """Bytes of the file."""
        boxes = self.boxes
        return len(safetensors_header(tensor_names(boxes), boxes, _METADATA)) + self.num_bytes


class FolderExport(ABC):
    """A resumable export."""

    def __init__(
        self,
        target: Path,
        shards: Sequence[ExportFile],
        described: Sequence[object],
        *,
        assets: Path | None,
        files: Files,
    ) -> None:
        """`described` is what another attempt must have in common with this one to continue it, and
        `assets` a folder with tokenizer files."""
        self.shards, self._assets, self._files = shards, assets, files
        token = hashlib.sha256(json.dumps(["complete files", *described]).encode())
        self.folder = PartialFolder(target, token.hexdigest()[:12], files)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, as written."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def shards_left(self) -> list[ExportFile]:
        """Files not written by an earlier attempt."""
        done = self.folder.done()
        return [shard for shard in self.shards if shard.file not in done]

    @property
    def num_bytes_left(self) -> int:
        """Bytes not written by an earlier attempt."""
        return sum(shard.num_bytes for shard in self.shards_left)

    def run(self, *, num_workers: int, written: Callable[[int], None]) -> list[str]:
        """Write what is missing, and return the names of the copied assets. `written` is called
        with byte counts, by any thread.

        Raises DamagedCheckpoint and OSError from reading and writing; nothing is left then. After
        KeyboardInterrupt complete files remain, from which the next run resumes.
        """
        with self.folder.open():
            left = self.shards_left
            written(self.num_bytes - sum(shard.num_bytes for shard in left))
            self.write(left, num_workers=num_workers, written=written)
            return self.complete()

    def write(
        self,
        shards: Sequence[ExportFile],
        *,
        num_workers: int,
        written: Callable[[int], None],
        tick: Tick = no_tick,
    ) -> None:
        """Write some of `shards`, durably, into the open folder. `tick` stops it by raising. Raises
        as `run`."""

        def write(shard: ExportFile, tick: Tick) -> None:
            with self.folder.writing(shard.file) as path:
                write_safetensors(
                    self._files,
                    path,
                    shard.boxes,
                    lambda: self._content(shard, written),
                    tick=tick,
                    metadata=_METADATA,
                )

        run_workers(shards, write, num_workers=num_workers, also=tick)

    def complete(self) -> list[str]:
        """Write the other files, and give the folder its name. Returns the names of the copied
        assets. Raises CheckpointError if a file is missing."""
        path, done = self.folder.path, self.folder.done()
        for shard in self.shards:
            # Other ranks may have written it.
            length = (path / shard.file).stat().st_size if shard.file in done else 0
            if length != shard.length:
                raise CheckpointError(
                    f"{path / shard.file} has {length} bytes, but {shard.length} were written."
                )
        copied = [] if self._assets is None else copy_assets(self._assets, path, self._files)
        if TOKENIZER_CONFIG in copied:
            rewrite_tokenizer_config(path, self._files)
        self._write_rest(copied)
        self.folder.finish()
        return copied

    @abstractmethod
    def _read(self, unit: ExportTensor) -> torch.Tensor:
        """Return the parameter of a tensor."""

    @abstractmethod
    def _write_rest(self, copied: Sequence[str]) -> None:
        """Write what is neither weights nor one of the `copied` assets."""

    def _content(
        self, shard: ExportFile, written: Callable[[int], None]
    ) -> Iterator[Iterator[memoryview]]:
        name, tensor = "", torch.empty(0)
        for unit in shard.units:
            if unit.name != name:
                # Freed first, so that one tensor is in memory at a time.
                del tensor
                name, tensor = unit.name, self._read(unit)
            yield _pieces(unit, tensor, written)


def check_target(target: Path, assets: Path | None) -> None:
    """Raise TargetExists if `target` exists, and CheckpointError if `assets` is not a folder, or
    has damaged files."""
    check_absent(target)
    if assets is not None and not assets.is_dir():
        raise CheckpointError(f"The tokenizer folder {assets} is not a folder.")
    if assets is not None:
        check_assets(assets)


def _pieces(
    unit: ExportTensor, tensor: torch.Tensor, written: Callable[[int], None]
) -> Iterator[memoryview]:
    """Yield the bytes of `unit`, from the parameter `tensor`, and report their numbers to
    `written`."""
    values = tensor if unit.row is None else tensor[unit.row]
    if unit.transposed:
        values = values.transpose(-2, -1).contiguous()
    for piece in cast_pieces(unit.key, values, unit.dtype):
        yield piece
        written(len(piece))
