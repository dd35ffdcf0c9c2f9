"""The fingerprint of a Hugging Face folder, by which adapters recognize their weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.harness.hugging_face import make_folder
from torchtitan_lite.checkpoint.convert.hugging_face import HuggingFaceFolder, HuggingFaceSnapshot
from torchtitan_lite.checkpoint.storage import open_parent_storage
from torchtitan_lite.models import hugging_face_model, model_spec, read_hugging_face_config


def fingerprint(folder: Path) -> str:
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    return HuggingFaceSnapshot(
        HuggingFaceFolder(*open_parent_storage(str(folder))), spec
    ).fingerprint()


def test_it_is_that_of_the_tensors_and_not_of_their_files(tmp_path: Path) -> None:
    expected = fingerprint(make_folder(tmp_path / "shards", "llama"))
    whole = make_folder(tmp_path / "whole", "llama", max_shard_size="1GB")
    assert fingerprint(whole) == expected
    assert fingerprint(make_folder(tmp_path / "b", "llama", dtype=torch.bfloat16)) != expected
    tensors = load_file(whole / "model.safetensors")
    for name, position in (("model.norm.weight", 0), ("lm_head.weight", -1)):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[position] += 1
        save_file(changed, whole / "model.safetensors", {"format": "pt"})
        assert fingerprint(whole) != expected, name
