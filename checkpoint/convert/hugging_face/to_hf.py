"""Export of a checkpoint to a Hugging Face folder that transformers loads: names, files and
settings."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpoint.adapters import MergedSnapshot
from torchtitan_lite.checkpoint.convert.conversion import expected_shapes
from torchtitan_lite.checkpoint.convert.hugging_face.earlier_releases import with_earlier_keys
from torchtitan_lite.checkpoint.convert.hugging_face.export import (
    ExportFile,
    ExportTensor,
    FolderExport,
    check_target,
)
from torchtitan_lite.checkpoint.convert.hugging_face.folder import (
    CONFIG,
    GENERATION,
    INDEX,
    WEIGHTS,
    json_bytes,
)
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import (
    expand_key,
    match_key,
    shape_there,
)
from torchtitan_lite.checkpoint.snapshots import Snapshot, StoredSnapshot, read_tensor
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.core.errors import CheckpointError, UserError
from torchtitan_lite.distributed.redistribute import TensorSpec
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey, HuggingFaceModel, ModelSpec

_MODEL = "model."


class HuggingFaceExport(FolderExport):
    """An export of a model."""

    def __init__(
        self,
        source: StoredSnapshot | MergedSnapshot,
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
        """`dtype` converts the weights (None keeps it), `assets` is a folder with tokenizer files,
        and `special_ids` are its `bos_token_id` and `eos_token_id`.

        Raises TargetExists if `target` exists, and CheckpointError if transformers does not support
        the model, or the checkpoint holds another one.
        """
        check_target(target, assets)
        if spec.hugging_face is None:
            raise CheckpointError(
                f"{spec.unknown_to_transformers}, so {source.where} cannot be exported."
            )
        self._model: HuggingFaceModel = spec.hugging_face
        self._source = source
        names = _weights(source, spec)
        if not drop_expert_bias:
            self._check_zero(names)
        tensors = {name: source.tensors[f"{_MODEL}{name}"] for name in names}
        groups = export_tensors(self._model.keys, tensors, dtype)
        shards = split_into_files(groups, max_shard_bytes)
        self._config = self._config_json(
            groups[0][0].dtype, assets, special_ids or {}, is_dtype_chosen=dtype is not None
        )
        described = [source.where, source.fingerprint(), str(dtype), max_shard_bytes]
        super().__init__(target, shards, described, assets=assets, files=files or Files())

    def _read(self, unit: ExportTensor) -> torch.Tensor:
        parts = [
            read_tensor(self._source, f"{_MODEL}{name}") for name in (unit.name, *unit.fused_with)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=unit.fused_dim)

    def _write_rest(self, copied: Sequence[str]) -> None:
        texts = {CONFIG: self._config}
        if GENERATION not in copied:
            ids = ("bos_token_id", "eos_token_id")
            texts[GENERATION] = {key: self._config.get(key) for key in ids}
        if len(self.shards) > 1:
            total = {"total_size": self.num_bytes}
            places = {unit.key: shard.file for shard in self.shards for unit in shard.units}
            texts[INDEX] = {"metadata": total, "weight_map": places}
        for name, values in texts.items():
            self._files.write_file(self.folder.path / name, json_bytes(values))

    def _config_json(
        self,
        dtype: torch.dtype,
        assets: Path | None,
        special_ids: Mapping[str, int | None],
        *,
        is_dtype_chosen: bool,
    ) -> dict[str, Any]:
        """Return the config.json that the model was imported with, if it still matches; otherwise a
        generated one. Raises CheckpointError for one of quantized weights, unless a dtype was
        chosen."""
        # transformers uses the architecture's defaults for missing keys.
        unknown = {"bos_token_id": None, "eos_token_id": None}
        values: Mapping[str, Any] = {**self._model.config, **unknown, **special_ids}
        if assets is not None:
            with suppress(OSError, ValueError, UserError):
                original = json.loads((assets / CONFIG).read_bytes())
                # That of a model with vision, say, is of more than these weights.
                is_whole = "text_config" not in original
                if is_whole and not self._model.differences(original):
                    values = with_earlier_keys(original, self._model.config)
        own = {key: self._model.config[key] for key in self._model.always_written}
        values = {**values, **own}
        if "quantization_config" in values:
            if not is_dtype_chosen:
                raise CheckpointError(
                    f"{self._source.where} was imported from quantized weights, which are not "
                    "written. Pass --dtype bf16 to export it without quantization."
                )
            values = {key: value for key, value in values.items() if key != "quantization_config"}
        # transformers 5 writes "dtype", and earlier releases read "torch_dtype".
        keys = {"torch_dtype", *(("dtype",) if "dtype" in values else ())}
        return {**values, **dict.fromkeys(keys, str(dtype).removeprefix("torch."))}

    def _check_zero(self, names: list[str]) -> None:
        ends = [rule.name.rpartition("*")[2] for rule in self._model.keys if not rule.forms]
        for name in names:
            if name.endswith(tuple(ends)) and read_tensor(self._source, f"{_MODEL}{name}").any():
                raise CheckpointError(
                    f"{self._source.where} has trained expert biases in {name}, which transformers "
                    "does not support: the exported model would route differently. Add "
                    "--drop-expert-bias to export it without."
                )


def export_tensors(
    rules: Sequence[HuggingFaceKey], tensors: Mapping[str, TensorSpec], dtype: torch.dtype | None
) -> list[list[ExportTensor]]:
    """Return the exported tensors of each parameter; zero buffers are omitted."""
    exported = []
    fused: dict[str, dict[int, str]] = {}
    for name, placed in tensors.items():
        rule, numbers = match_key(rules, name)
        if not rule.forms:
            continue
        shape, kind = placed.shape, dtype or placed.dtype
        keys = expand_key(rule.forms[0], numbers, shape)
        if rule.forms[0].key.count("*") > len(numbers):
            exported.append(
                [ExportTensor(key, name, row, shape[1:], kind) for row, key in enumerate(keys)]
            )
        else:
            form = rule.forms[0]
            parts = fused.setdefault(keys[0], {})
            parts[form.part[0] if form.rows is None else form.rows[0]] = name
            if not _is_complete(form, [tensors[part].shape for part in parts.values()]):
                continue
            first, *others = (parts[part] for part in sorted(parts))
            shape = shape_there(form, shape)
            exported.append(
                [
                    ExportTensor(
                        *(keys[0], first, None, shape, kind, form.transposed, tuple(others)),
                        fused_dim=-2 if form.rows is None else 0,
                    )
                ]
            )
    return exported


def _is_complete(form: HuggingFaceForm, parts: Sequence[Sequence[int]]) -> bool:
    """Return whether parameters of these shapes are all of a fused tensor."""
    if form.rows is None:
        return len(parts) == form.part[1]
    return sum(shape[0] for shape in parts) == form.rows[1]


def split_into_files(groups: Sequence[Sequence[ExportTensor]], max_bytes: int) -> list[ExportFile]:
    """Distribute tensors over files of at most `max_bytes`, unless a single tensor is larger.
    Tensors of one parameter stay together if they fit, because they are read together."""
    batches = list(_batches(groups, max_bytes))
    if len(batches) == 1:
        return [ExportFile(WEIGHTS, tuple(batches[0]))]
    return [
        ExportFile(f"model-{number:05d}-of-{len(batches):05d}.safetensors", tuple(batch))
        for number, batch in enumerate(batches, 1)
    ]


def _weights(source: Snapshot, spec: ModelSpec) -> list[str]:
    """Return the model's parameters and buffers. Raises CheckpointError that lists mismatches."""
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


def _batches(
    groups: Sequence[Sequence[ExportTensor]], max_bytes: int
) -> Iterator[list[ExportTensor]]:
    batch: list[ExportTensor] = []
    size = 0
    for group in groups:
        together = sum(unit.num_bytes for unit in group)
        for unit in group:
            starts = unit is group[0] and together <= max_bytes < size + together
            if batch and (starts or size + unit.num_bytes > max_bytes):
                yield batch
                batch, size = [], 0
            batch.append(unit)
            size += unit.num_bytes
    if batch:
        yield batch
