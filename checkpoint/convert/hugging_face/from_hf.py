"""Import of a Hugging Face folder into a checkpoint, one block at a time.

A parameter's holders are consecutive along dim 0, so writing their blocks in order produces the
file.

Invariant: a file is announced once it is durable, and the checkpoint is visible once it is
complete. A resumed import does not rewrite announced files.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite import __version__
from torchtitan_lite.checkpoint.convert.conversion import (
    TargetExists,
    Tick,
    lock_folder,
    run_workers,
    unsharded_part,
)
from torchtitan_lite.checkpoint.convert.hugging_face.folder import (
    CONFIG,
    check_assets,
    copy_assets,
)
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.format import step_name, tensor_file_name
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.attempts import Announcements
from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox
from torchtitan_lite.checkpoint.tensors import DTYPE_NAMES, cast, tensor_bytes
from torchtitan_lite.distributed.mesh import ParallelDims

BLOCK_BYTES = 8 << 20
"""Bytes that a worker holds at a time; twice if the dtype changes."""
_STEP = 0
_NUM_FILES = 16
_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 64 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class HuggingFaceImport:
    """A resumable import."""

    source: HuggingFaceSnapshot
    """Source, opened with blocks of `BLOCK_BYTES`."""
    storage: Storage
    dtype: torch.dtype | None
    """Dtype of the weights; None keeps it."""
    run_config: Mapping[str, Any]
    assets: Path | None = None
    """Folder that receives a copy of tokenizer and config."""
    file_bytes: int | None = None
    """Approximate bytes per file; None for about 16 files of limited size."""

    @property
    def where(self) -> str:
        """Location of the resulting checkpoint."""
        return f"{self.storage.root}/{step_name(_STEP)}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, as written."""
        return self._size(self.source.tensors)

    @property
    def num_bytes_left(self) -> int:
        """Bytes not written by an earlier attempt."""
        done = self._written(self._token()).parts
        batches = enumerate(self._batches())
        return sum(self._size(names) for number, names in batches if number not in done)

    def run(self, *, num_workers: int, written: Callable[[int], None]) -> None:
        """Write what is missing. `written` is called with byte counts, by any thread.

        Raises TargetExists if the step exists or another process imports it, and DamagedCheckpoint
        and OSError from reading and writing; nothing is left then. After KeyboardInterrupt complete
        files remain, from which the next run resumes.
        """
        check_assets(Path(self.source.where))
        if _STEP in self.storage.steps():
            raise TargetExists(f"{self.where} already exists. Delete it, or use another folder.")
        token = self._token()
        with self._alone():
            had_assets = self.assets is not None and self.assets.exists()
            try:
                self._convert(token, num_workers, written)
            except Exception:
                attempts.abandon(self.storage, _STEP, token)
                if self.assets is not None and not had_assets:
                    Files().rmtree(self.assets)
                raise

    def _convert(self, token: str, num_workers: int, written: Callable[[int], None]) -> None:
        if not self.storage.steps():
            # Leftovers of attempts with another source or dtype are useless.
            attempts.recover(self.storage, token)
        if self.assets is not None:
            copy_assets(Path(self.source.where), self.assets, Files(), also=(CONFIG,))
        batches = list(self._batches())
        done = self._written(token).parts
        for number in done:
            written(self._size(batches[number]))

        def write(number: int, tick: Tick) -> None:
            part = self._write(token, number, batches[number], written, tick)
            attempts.put_part(self.storage, _STEP, token, number, part)

        todo = [number for number in range(len(batches)) if number not in done]
        run_workers(todo, write, num_workers=num_workers)
        announced = self._written(token)
        parts = [attempts.read_part(self.storage, announced, n) for n in range(len(batches))]
        attempts.commit(self.storage, _STEP, token, parts, self._base())

    def _written(self, token: str) -> Announcements:
        return attempts.announcements(self.storage, _STEP, token)

    def _alone(self) -> AbstractContextManager[None]:
        """Lock the target against processes of this machine; an object store has no locks."""
        folder = self.storage.folder
        if folder is None:
            return nullcontext()
        Files().make_folders(folder)
        return lock_folder(folder)

    def _base(self) -> dict[str, Any]:
        return {
            "mesh": asdict(ParallelDims()),
            "config": dict(self.run_config),
            "versions": {"torchtitan_lite": __version__, "torch": torch.__version__},
            "values": {},
            "model_only": True,
        }

    def _write(
        self, token: str, number: int, names: list[str], written: Callable[[int], None], tick: Tick
    ) -> dict[str, Any]:
        file, boxes = tensor_file_name(number), [self._box(name) for name in names]

        def content() -> Iterator[Iterator[memoryview]]:
            for name in names:
                yield self._pieces(name, written)

        places = self.storage.write(_STEP, token, file, boxes, content, tick=tick)
        return unsharded_part(_STEP, number, file, boxes, places)

    def _pieces(self, name: str, written: Callable[[int], None]) -> Iterator[memoryview]:
        placed, dtype = self.source.tensors[name], self._dtype(name)
        for holder in placed.layout.mesh.holders:
            block = torch.empty(placed.layout.local_shape(placed.shape, holder), dtype=placed.dtype)
            self.source.read_part(name, holder, block)
            piece = tensor_bytes(cast(name, block, dtype))
            yield piece
            written(len(piece))

    def _dtype(self, name: str) -> torch.dtype:
        stored = self.source.tensors[name].dtype
        return stored if self.dtype is None or not self.source.is_weight(name) else self.dtype

    def _box(self, name: str) -> PartBox:
        shape, dtype = self.source.tensors[name].shape, self._dtype(name)
        return PartBox(name, DTYPE_NAMES[dtype], shape, 0, prod(shape) * dtype.itemsize)

    def _size(self, names: Iterable[str]) -> int:
        return sum(self._box(name).bytes for name in names)

    def _batches(self) -> Iterator[list[str]]:
        """Yield the parameters of each file, of similar size and independent of the number of
        workers."""
        wanted = self.file_bytes
        if wanted is None:
            wanted = min(max(self.num_bytes // _NUM_FILES, _LEAST_FILE_BYTES), _MOST_FILE_BYTES)
        batch: list[str] = []
        size = 0
        for name in self.source.tensors:
            batch.append(name)
            size += self._box(name).bytes
            if size >= wanted:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _token(self) -> str:
        """Return a token that is equal for the same work: unmodified source files and the same
        dtype."""
        folder = self.source.folder
        try:
            stats = [Path(folder.where, file).stat() for file in folder.files]
        except OSError:
            # Object stores do not report these.
            return secrets.token_hex(6)
        description = [
            *(folder.where, str(self.dtype), __version__),
            *([stat.st_size, stat.st_mtime_ns, stat.st_ino] for stat in stats),
            *([name, list(placed.shape)] for name, placed in self.source.tensors.items()),
        ]
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:12]
