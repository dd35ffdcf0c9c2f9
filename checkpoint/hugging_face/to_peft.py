"""Export of adapters to a folder that PEFT loads: adapter_config.json and
adapter_model.safetensors. Layer: above to_hf.

Invariant: the folder appears under its name once it is complete.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from torchtitan_lite.checkpoint.adapters import adapted_layers, recorded_base
from torchtitan_lite.checkpoint.conversion import Tick, run_workers
from torchtitan_lite.checkpoint.hugging_face.folder import copy_assets, json_bytes
from torchtitan_lite.checkpoint.hugging_face.snapshot import expand_key, match_key
from torchtitan_lite.checkpoint.hugging_face.to_hf import (
    ExportTensor,
    PartialFolder,
    check_target,
    pieces,
)
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot, read_tensor
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox, write_stream
from torchtitan_lite.checkpoint.tensors import DTYPE_NAMES
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger
from torchtitan_lite.nn.lora import LORA_A, LORA_B
from torchtitan_lite.schema.lora import LoRAConfig
from torchtitan_lite.spec import HuggingFaceKey, ModelSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_THEIRS = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight"}
"""PEFT's names of the matrices, which have the same shapes there."""


class AdapterExport:
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
                f"{spec.name} {spec.flavor} is unknown to transformers, so the adapters in "
                f"{source.where} cannot be exported."
            )
        self._source, self._assets = source, assets
        self._files = files or Files()
        modules = {
            name: module_name(spec.hugging_face.keys, name) for name in adapted_layers(source)
        }
        if spec.num_experts and any(".feed_forward." in name for name in modules):
            logger.warning(
                "PEFT 0.21 with transformers 5 takes adapters of dense layers and shared experts "
                "for those of stacked experts, if a model has some. Export merged weights for it."
            )
        self._tensors: list[ExportTensor] = []
        for name, there in modules.items():
            for ours, theirs in _THEIRS.items():
                placed = source.tensors[f"model.{name}.{ours}"]
                key, kind = f"{_PREFIX}{there}.{theirs}", dtype or placed.dtype
                self._tensors.append(ExportTensor(key, f"{name}.{ours}", None, placed.shape, kind))
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
        token = hashlib.sha256(f"{source.where} {source.fingerprint()} {dtype}".encode())
        self._folder = PartialFolder(target, token.hexdigest()[:12], self._files)

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters, as written."""
        return sum(tensor.num_bytes for tensor in self._tensors)

    num_bytes_left = num_bytes

    def run(self, *, num_workers: int, written: Callable[[int], None]) -> list[str]:
        """Write the folder, and return the names of the copied assets. `written` is called with
        byte counts, by another thread. Raises as `HuggingFaceExport.run` does; nothing is left
        then."""

        def write(file: str, tick: Tick) -> None:
            boxes = [
                PartBox(unit.key, DTYPE_NAMES[unit.dtype], unit.shape, 0, unit.num_bytes)
                for unit in self._tensors
            ]
            write_stream(
                self._files,
                self._folder.path / file,
                boxes,
                lambda: self._content(written),
                tick=tick,
                metadata={"format": "pt"},
            )

        with self._folder.open():
            run_workers([WEIGHTS], write, num_workers=min(1, num_workers))
            folder = self._folder.path
            copied = [] if self._assets is None else copy_assets(self._assets, folder, self._files)
            self._files.write_file(folder / CONFIG, json_bytes(self._config))
            self._folder.finish()
        return copied

    def _content(self, written: Callable[[int], None]) -> Iterator[Iterator[memoryview]]:
        for unit in self._tensors:
            yield pieces(unit, read_tensor(self._source, f"model.{unit.name}"), written)


def module_name(keys: Sequence[HuggingFaceKey], layer: str) -> str:
    """Return the name in transformers of a linear layer of this project. Raises CheckpointError if
    it is a part of another one there."""
    rule, numbers = match_key(keys, f"{layer}.weight")
    form = rule.forms[0] if rule.forms else None
    if form is None or form.part != (0, 1) or form.transposed or not form.key.endswith(".weight"):
        raise CheckpointError(
            f"{layer} is not a linear layer of its own in transformers, so its adapter cannot be "
            "exported. Merge it: torchtitan-lite convert to-hf --merge."
        )
    (key,) = expand_key(form, numbers, ())
    return key.removesuffix(".weight")
