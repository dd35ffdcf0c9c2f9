"""Export of adapters to a folder that PEFT loads: adapter_config.json and
adapter_model.safetensors."""

from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan_lite.checkpoint.adapters import adapted_layers, recorded_base
from torchtitan_lite.checkpoint.convert.hugging_face.export import (
    ExportFile,
    ExportTensor,
    FolderExport,
    check_target,
)
from torchtitan_lite.checkpoint.convert.hugging_face.folder import json_bytes
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import expand_key, match_key
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot, read_tensor
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.config.tables.lora import LoRAConfig
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.log import logger
from torchtitan_lite.nn.lora import LORA_A, LORA_B
from torchtitan_lite.nn.spec import HuggingFaceKey, ModelSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_THEIRS = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight"}
"""PEFT's names of the matrices, which have the same shapes there."""


class AdapterExport(FolderExport):
    """An export of adapters alone."""

    def __init__(
        self,
        source: StoredSnapshot,
        target: Path,
        spec: ModelSpec,
        lora: LoRAConfig,
        *,
        dtype: torch.dtype | None = None,
        assets: Path | None = None,
        files: Files | None = None,
    ) -> None:
        """`spec` is the model without adapters, `dtype` converts the adapters (None keeps it), and
        `assets` is a folder with tokenizer files.

        Raises TargetExists if `target` exists, and CheckpointError if transformers has no linear
        layer of its own for one that is adapted.
        """
        check_target(target, assets)
        base = recorded_base(source)
        assert base is not None
        if spec.hugging_face is None:
            raise CheckpointError(
                f"{spec.unknown_to_transformers}, so the adapters in {source.where} cannot be "
                "exported."
            )
        self._source = source
        modules = {
            name: peft_module_name(spec.hugging_face.keys, name) for name in adapted_layers(source)
        }
        if spec.num_experts and any(".feed_forward." in name for name in modules):
            logger.warning(
                "PEFT 0.21 with transformers 5 takes adapters of dense layers and shared experts "
                "for those of stacked experts, if a model has some. Export merged weights for it."
            )
        tensors: list[ExportTensor] = []
        for name, there in modules.items():
            for ours, theirs in _THEIRS.items():
                placed = source.tensors[f"model.{name}.{ours}"]
                key, kind = f"{_PREFIX}{there}.{theirs}", dtype or placed.dtype
                tensors.append(ExportTensor(key, f"{name}.{ours}", None, placed.shape, kind))
        self._config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base.path,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "use_rslora": lora.use_rslora,
            "target_modules": sorted(modules.values()),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        described = [source.where, source.fingerprint(), str(dtype)]
        shards = [ExportFile(WEIGHTS, tuple(tensors))]
        super().__init__(target, shards, described, assets=assets, files=files or Files())

    def _read(self, unit: ExportTensor) -> torch.Tensor:
        return read_tensor(self._source, f"model.{unit.name}")

    def _write_rest(self, copied: Sequence[str]) -> None:
        self._files.write_file(self.folder.path / CONFIG, json_bytes(self._config))


def peft_module_name(keys: Sequence[HuggingFaceKey], layer: str) -> str:
    """Return the name in transformers of a linear layer of this project. Raises CheckpointError if
    it is a part of another one there."""
    rule, numbers = match_key(keys, f"{layer}.weight")
    form = rule.forms[0] if rule.forms else None
    if form is None or not form.is_whole or not form.key.endswith(".weight"):
        raise CheckpointError(
            f"{layer} is not a linear layer of its own in transformers, so its adapter cannot be "
            "exported. Export merged weights: torchtitan-lite convert to-hf --merge; or leave the "
            "layer out of lora.targets."
        )
    (key,) = expand_key(form, numbers, ())
    return key.removesuffix(".weight")
