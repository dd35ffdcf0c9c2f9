"""From a Hugging Face folder to a checkpoint of ours, a block at a time.

A parameter's holders follow each other along dim 0, so that the way into one file is to write their
blocks in order. Layer: above snapshot, workers and whole.

Invariant: a file is announced once it is durable, and the checkpoint is seen once it is whole. What
was announced before an interrupt is not written again.
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
from torchtitan_lite.checkpoint.dtypes import NAME_OF
from torchtitan_lite.checkpoint.file_names import file_name
from torchtitan_lite.checkpoint.hugging_face.assets import copy_assets
from torchtitan_lite.checkpoint.hugging_face.folder import CONFIG
from torchtitan_lite.checkpoint.hugging_face.lock import TargetTaken, locked
from torchtitan_lite.checkpoint.hugging_face.snapshot import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.hugging_face.workers import Tick, share_out
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.manifest_json import build_manifest, manifest_bytes
from torchtitan_lite.checkpoint.storage.names import step_name
from torchtitan_lite.checkpoint.storage.part_file import PartBox
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.checkpoint.tensor_bytes import bytes_of
from torchtitan_lite.checkpoint.whole import cast, part_of_whole
from torchtitan_lite.mesh import Degrees

BLOCK_BYTES = 8 << 20
"""That a worker holds at a time, twice where the dtype changes."""
_STEP = 0
_NUM_FILES = 16
_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 64 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class FromHuggingFace:
    """A conversion, and how far an earlier attempt at it came."""

    source: HuggingFaceSnapshot
    """With blocks of `BLOCK_BYTES`."""
    storage: Storage
    dtype: torch.dtype | None
    """Of the weights; None: as they are."""
    run_config: Mapping[str, Any]
    assets: Path | None = None
    """Folder that gets a copy of tokenizer and settings."""
    file_bytes: int | None = None
    """Of a file, about; None: so many that there are some files, and none is too large."""

    @property
    def where(self) -> str:
        """What is made."""
        return f"{self.storage.root}/{step_name(_STEP)}"

    @property
    def num_bytes(self) -> int:
        """Of all weights, as they are written."""
        return self._size(self.source.tensors)

    @property
    def num_bytes_left(self) -> int:
        """Of those that no earlier attempt has written."""
        done = self.storage.parts_present(_STEP, self._token())
        batches = enumerate(self._batches())
        return sum(self._size(names) for number, names in batches if number not in done)

    def run(self, *, num_workers: int, written: Callable[[int], None]) -> None:
        """Write what is missing. `written` is told of bytes, by any thread.

        Raises TargetTaken where the step is there already or another process is at it,
        DamagedCheckpoint and OSError as reading and writing do; then nothing is left. After
        KeyboardInterrupt whole files are left, with which another run goes on.
        """
        if _STEP in self.storage.steps():
            raise TargetTaken(f"{self.where} is there already. Give another folder, or delete it.")
        token = self._token()
        self.storage.begin(_STEP, token)
        with self._alone():
            had_assets = self.assets is not None and self.assets.exists()
            try:
                self._convert(token, num_workers, written)
            except Exception:
                self.storage.abandon(_STEP, token)
                if self.assets is not None and not had_assets:
                    Files().rmtree(self.assets)
                raise

    def _convert(self, token: str, num_workers: int, written: Callable[[int], None]) -> None:
        if not self.storage.steps():
            # What attempts at something else have left is of no use any more.
            self.storage.recover(token)
        if self.assets is not None:
            copy_assets(Path(self.source.where), self.assets, Files(), also=(CONFIG,))
        batches = list(self._batches())
        done = self.storage.parts_present(_STEP, token)
        for number in done:
            written(self._size(batches[number]))

        def write(number: int, tick: Tick) -> None:
            part = self._write(token, number, batches[number], written, tick)
            self.storage.put_part(_STEP, token, number, part)

        todo = [number for number in range(len(batches)) if number not in done]
        share_out(todo, write, num_workers=num_workers)
        parts = [self.storage.read_part(_STEP, token, n) for n in range(len(batches))]
        manifest = build_manifest(_STEP, parts, self._base())
        self.storage.commit(_STEP, token, manifest_bytes(manifest))

    def _alone(self) -> AbstractContextManager[None]:
        """Among the processes of this machine; an object store has no locks."""
        return nullcontext() if "://" in self.storage.root else locked(Path(self.storage.root))

    def _base(self) -> dict[str, Any]:
        return {
            "mesh": asdict(Degrees()),
            "config": dict(self.run_config),
            "versions": {"torchtitan_lite": __version__, "torch": torch.__version__},
            "values": {},
            "model_only": True,
        }

    def _write(
        self, token: str, number: int, names: list[str], written: Callable[[int], None], tick: Tick
    ) -> dict[str, Any]:
        file, boxes = file_name(number), [self._box(name) for name in names]

        def content() -> Iterator[Iterator[memoryview]]:
            for name in names:
                yield self._pieces(name, written)

        places = self.storage.write_stream(_STEP, token, file, boxes, content, tick=tick)
        return part_of_whole(_STEP, number, file, boxes, places)

    def _pieces(self, name: str, written: Callable[[int], None]) -> Iterator[memoryview]:
        placed, dtype = self.source.tensors[name], self._dtype(name)
        for holder in placed.layout.mesh.holders:
            block = torch.empty(placed.layout.local_shape(placed.shape, holder), dtype=placed.dtype)
            self.source.read_part(name, holder, block)
            piece = bytes_of(cast(name, block, dtype))
            yield piece
            written(len(piece))

    def _dtype(self, name: str) -> torch.dtype:
        stored = self.source.tensors[name].dtype
        return stored if self.dtype is None or not self.source.is_weight(name) else self.dtype

    def _box(self, name: str) -> PartBox:
        shape, dtype = self.source.tensors[name].shape, self._dtype(name)
        return PartBox(name, NAME_OF[dtype], shape, 0, prod(shape) * dtype.itemsize)

    def _size(self, names: Iterable[str]) -> int:
        return sum(self._box(name).bytes for name in names)

    def _batches(self) -> Iterator[list[str]]:
        """The parameters of each file: of about the same size, however many workers there are."""
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
        """The same for the same work: source files that nobody has changed, and the same dtype."""
        folder = self.source.folder
        try:
            stats = [Path(folder.where, file).stat() for file in folder.files]
        except OSError:
            # In an object store, of which this is not known.
            return secrets.token_hex(6)
        told = [
            *(folder.where, str(self.dtype), __version__),
            *([stat.st_size, stat.st_mtime_ns, stat.st_ino] for stat in stats),
            *([name, list(placed.shape)] for name, placed in self.source.tensors.items()),
        ]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
