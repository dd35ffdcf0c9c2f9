"""From a checkpoint of ours to a Hugging Face folder that transformers loads, a tensor at a time.

Layer: above shards, unfinished, workers, assets and whole.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpoint.dtypes import NAME_OF
from torchtitan_lite.checkpoint.hugging_face.assets import GENERATION, copy_assets, json_bytes
from torchtitan_lite.checkpoint.hugging_face.folder import CONFIG, INDEX
from torchtitan_lite.checkpoint.hugging_face.lock import TargetTaken
from torchtitan_lite.checkpoint.hugging_face.shards import (
    Shard,
    Unit,
    share_out_units,
    units_of,
)
from torchtitan_lite.checkpoint.hugging_face.unfinished import UnfinishedFolder
from torchtitan_lite.checkpoint.hugging_face.workers import Tick, share_out
from torchtitan_lite.checkpoint.model_shapes import expected_shapes
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.part_file import PartBox, write_stream
from torchtitan_lite.checkpoint.whole import cast_pieces, whole
from torchtitan_lite.errors import CheckpointError, UserError
from torchtitan_lite.spec import HuggingFaceModel, ModelSpec

_MODEL = "model."


class ToHuggingFace:
    """An export, and how far an earlier attempt at it came."""

    def __init__(
        self,
        source: StoredSnapshot,
        target: Path,
        spec: ModelSpec,
        *,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 5 * 10**9,
        assets: Path | None = None,
        special_ids: Mapping[str, int | None] | None = None,
        drop_expert_bias: bool = False,
        files: Files | None = None,
    ) -> None:
        """`dtype` is that of the weights (None: as they are), `assets` a folder with the files of
        the tokenizer, and `special_ids` its `bos_token_id` and `eos_token_id`.

        Raises TargetTaken where `target` is there, and CheckpointError where the model is none of
        transformers, or the checkpoint holds another one.
        """
        if os.path.lexists(target):
            raise TargetTaken(f"{target} is there already. Give another folder, or delete it.")
        if assets is not None and not assets.is_dir():
            raise CheckpointError(f"{assets}, which should have the tokenizer, is no folder.")
        if spec.hugging_face is None:
            raise CheckpointError(
                f"{spec.name} {spec.flavor} is no model of transformers, so {source.where} cannot "
                "be exported."
            )
        self._model: HuggingFaceModel = spec.hugging_face
        self._source, self._assets = source, assets
        self._files = files or Files()
        names = _weights(source, spec)
        if not drop_expert_bias:
            self._check_zero(names)
        tensors = {name: source.tensors[f"{_MODEL}{name}"] for name in names}
        groups = units_of(self._model.keys, tensors, dtype)
        self._shards = share_out_units(groups, max_shard_bytes)
        self._config = self._config_json(groups[0][0].dtype, special_ids or {})
        told = json.dumps([source.where, source.manifest.xxh3, str(dtype), max_shard_bytes])
        token = hashlib.sha256(told.encode()).hexdigest()[:12]
        self._folder = UnfinishedFolder(target, token, self._files)

    @property
    def num_bytes(self) -> int:
        """Of all weights, as they are written."""
        return sum(shard.num_bytes for shard in self._shards)

    @property
    def num_bytes_left(self) -> int:
        """Of those that no earlier attempt has written."""
        left = (shard for shard in self._shards if not self._folder.is_noted(shard.file))
        return sum(shard.num_bytes for shard in left)

    def run(self, *, num_workers: int, written: Callable[[int], None]) -> list[str]:
        """Write what is missing, and return the names of the copied files. `written` is told of
        bytes, by any thread.

        Raises DamagedCheckpoint and OSError as reading and writing do; then nothing is left. After
        KeyboardInterrupt whole files are left, with which another run goes on.
        """

        def write(shard: Shard, tick: Tick) -> None:
            if self._folder.is_noted(shard.file):
                written(shard.num_bytes)
                return
            boxes = [
                PartBox(unit.key, NAME_OF[unit.dtype], unit.shape, 0, unit.num_bytes)
                for unit in shard.units
            ]
            write_stream(
                self._files,
                self._folder.path / shard.file,
                boxes,
                lambda: self._content(shard, written),
                tick=tick,
                # Without it transformers refuses a file.
                metadata={"format": "pt"},
            )
            self._folder.note(shard.file)

        with self._folder.open():
            share_out(self._shards, write, num_workers=num_workers)
            copied = self._write_rest()
            self._folder.finish()
        return copied

    def _content(
        self, shard: Shard, written: Callable[[int], None]
    ) -> Iterator[Iterator[memoryview]]:
        name, tensor = "", torch.empty(0)
        for unit in shard.units:
            if unit.name != name:
                # The one before goes first, so that there is one at a time.
                del tensor
                name, tensor = unit.name, whole(self._source, f"{_MODEL}{unit.name}")
            yield _pieces(unit, tensor, written)

    def _write_rest(self) -> list[str]:
        folder = self._folder.path
        copied = [] if self._assets is None else copy_assets(self._assets, folder, self._files)
        texts = {CONFIG: self._config}
        if GENERATION not in copied:
            ids = ("bos_token_id", "eos_token_id")
            texts[GENERATION] = {key: self._config.get(key) for key in ids}
        if len(self._shards) > 1:
            total = {"total_size": self.num_bytes}
            places = {unit.key: shard.file for shard in self._shards for unit in shard.units}
            texts[INDEX] = {"metadata": total, "weight_map": places}
        for name, values in texts.items():
            self._files.write_file(folder / name, json_bytes(values))
        return copied

    def _config_json(
        self, dtype: torch.dtype, special_ids: Mapping[str, int | None]
    ) -> dict[str, Any]:
        """That of the folder which the model came from, where it still describes it; else our
        own."""
        # What is not said, transformers takes from the defaults of the architecture.
        unknown = {"bos_token_id": None, "eos_token_id": None}
        values: Mapping[str, Any] = {**self._model.config, **unknown, **special_ids}
        if self._assets is not None:
            with suppress(OSError, ValueError, UserError):
                original = json.loads((self._assets / CONFIG).read_bytes())
                if not self._model.differences(original):
                    values = original
        key = "dtype" if "dtype" in values else "torch_dtype"
        return {**values, key: str(dtype).removeprefix("torch.")}

    def _check_zero(self, names: list[str]) -> None:
        ends = [rule.name.rpartition("*")[2] for rule in self._model.keys if not rule.forms]
        for name in names:
            if name.endswith(tuple(ends)) and whole(self._source, f"{_MODEL}{name}").any():
                raise CheckpointError(
                    f"{self._source.where} has balanced its experts by {name}, which transformers "
                    "does not know: the exported model would route otherwise. Add "
                    "--drop-expert-bias to export it without."
                )


def _weights(source: StoredSnapshot, spec: ModelSpec) -> list[str]:
    """The model's parameters and buffers. Raises CheckpointError that lists what does not fit."""
    parameters, buffers = expected_shapes(spec)
    wanted = parameters | buffers
    held = {
        name.removeprefix(_MODEL): placed.shape
        for name, placed in source.tensors.items()
        if name.startswith(_MODEL)
    }
    if held != wanted:
        names = sorted(name for name in held | wanted if held.get(name) != wanted.get(name))
        raise CheckpointError(
            f"{source.where} holds other weights than {spec.name} {spec.flavor}: "
            f"{', '.join(names[:20])}. The configuration in its manifest is of another model."
        )
    return list(wanted)


def _pieces(
    unit: Unit, tensor: torch.Tensor, written: Callable[[int], None]
) -> Iterator[memoryview]:
    found = tensor if unit.row is None else tensor[unit.row]
    for piece in cast_pieces(unit.key, found, unit.dtype):
        yield piece
        written(len(piece))
