"""Hugging Face folders that are damaged, incomplete, hostile or unsupported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.hugging_face import make_folder, our_model
from tests.unit.conftest import Fsyncs
from torchtitan_lite.checkpoint.convert.hugging_face import snapshot
from torchtitan_lite.checkpoint.convert.hugging_face.folder import (
    INDEX,
    copy_assets,
    is_hugging_face,
)
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.loading import open_snapshot
from torchtitan_lite.checkpoint.snapshots import read_tensor
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.cli import main
from torchtitan_lite.core.errors import CheckpointError, ConfigError, DamagedCheckpoint, UserError
from torchtitan_lite.models import hugging_face_model, model_spec, read_hugging_face_config


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hf"), "qwen3_moe")


@pytest.fixture
def folder(whole_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_folder, tmp_path / "model"))


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_bytes())
    change(values)
    path.write_text(json.dumps(values))


def load_error(folder: Path) -> UserError:
    with pytest.raises(CheckpointError) as caught:
        our_model(folder)
    return caught.value


def test_a_complete_folder_loads(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"not named by the index, so not read")
    our_model(folder)


def test_a_snapshot_of_a_cache_loads(folder: Path, tmp_path: Path) -> None:
    """It consists of links to files named by their hashes."""
    blobs, links = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    folder.rename(blobs)
    links.mkdir(parents=True)
    for number, blob in enumerate(sorted(blobs.iterdir())):
        (links / blob.name).symlink_to(Path("../../blobs") / f"{number:064x}")
        blob.rename(blobs / f"{number:064x}")
    our_model(links)


def test_a_truncated_shard_is_named(folder: Path) -> None:
    path = first_file(folder)
    path.write_bytes(path.read_bytes()[:-100])
    error = load_error(folder)
    assert isinstance(error, DamagedCheckpoint)
    assert path.name in str(error) and "Download it again" in str(error)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 7, b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b"\x08" + b"\x00" * 40],
)
def test_a_shard_that_is_not_a_safetensors_file_is_named(folder: Path, content: bytes) -> None:
    first_file(folder).write_bytes(content)
    assert first_file(folder).name in str(load_error(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1, 3]},
        {"shape": [10**18, 10**18]},
        {"dtype": "F7"},
        {"data_offsets": [0]},
        {"data_offsets": [8, 4]},
        {"data_offsets": [10, 20]},
    ],
)
def test_an_inconsistent_header_is_named(folder: Path, change: dict[str, Any]) -> None:
    path = first_file(folder)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    key = next(name for name in header if name != "__metadata__")
    header[key] |= change
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + size :])
    error = load_error(folder)
    assert isinstance(error, DamagedCheckpoint)
    assert path.name in str(error) and key in str(error)


def test_a_missing_shard_is_named(folder: Path) -> None:
    name = first_file(folder).name
    first_file(folder).unlink()
    assert f"{name} named by {INDEX} is missing" in str(load_error(folder))


def test_an_index_that_names_a_nonexistent_file(folder: Path) -> None:
    edit(folder / INDEX, lambda values: values["weight_map"].update(a="other.safetensors"))
    assert "other.safetensors named by" in str(load_error(folder))


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 7, "..", ""]
)
def test_an_index_cannot_point_outside_the_folder(folder: Path, file: Any) -> None:
    save_file({"a": torch.zeros(1)}, folder.parent / "secret.safetensors")
    edit(folder / INDEX, lambda values: values["weight_map"].update(a=file))
    error = load_error(folder)
    assert isinstance(error, DamagedCheckpoint)
    assert "is rejected" in str(error)


def test_links_of_the_hub_cache_are_followed(whole_folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(whole_folder.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    our_model(snapshot)


def test_contradictions_of_index_and_headers(folder: Path) -> None:
    path = first_file(folder)
    tensors = load_file(path)
    key = next(iter(tensors))
    tensors["stranger"] = tensors.pop(key)
    save_file(tensors, path)
    text = str(load_error(folder))
    assert f"{path.name} does not hold {key}" in text
    assert f"{path.name} holds stranger, which is not in {INDEX}" in text


def test_all_mismatches_are_listed(folder: Path) -> None:
    (folder / INDEX).unlink()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(5)
    tensors["model.layers.0.mlp.surprise"] = torch.zeros(1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    text = str(load_error(folder))
    assert "(4 problems)" in text
    assert "model.layers.1.mlp.experts.2.up_proj.weight is missing" in text
    assert "model.norm.weight has shape [5], and [48] is needed" in text
    assert "model.layers.0.mlp.surprise is unexpected" in text
    assert "lm_head.weight is of torch.float8_e4m3fn: quantized weights" in text
    assert "inv_freq" not in text


def test_quantized_folders_are_rejected_by_every_command(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    edit(folder / "config.json", lambda v: v.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ConfigError, match=r"quantized \(fp8\).*dequantize\(\)"):
        open_snapshot(*open_parent_storage(str(folder)), spec)
    assert main(["convert", "from-hf", str(folder), str(tmp_path / "out")]) == 1
    assert "dequantize()" in capsys.readouterr().err


def test_pickles_are_rejected_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, a pickle.*save_pretrained"):
        is_hugging_face(*open_parent_storage(str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"num_experts_per_tok": 1}, "top_k is 1 in its config.json and 2 here"),
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
            "model_type is 'mixtral', and qwen3 or qwen3_moe is needed",
        ),
        ({"model_type": None}, "model_type is None"),
    ],
)
def test_a_model_that_differs_from_the_folder_is_rejected(
    change: dict[str, Any], remedy: str, folder: Path
) -> None:
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    edit(folder / "config.json", lambda values: values.update(change))
    with pytest.raises(UserError) as caught:
        open_snapshot(*open_parent_storage(str(folder)), spec)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("num_blocks", [1, 3, 8, 100])
def test_blocks_cover_every_parameter(
    num_blocks: int, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_SMALL_BYTES", 0)
    folder = make_folder(tmp_path / "hf", family)
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    one = HuggingFaceSnapshot(*open_parent_storage(str(folder)), spec)
    split = HuggingFaceSnapshot(*open_parent_storage(str(folder)), spec, num_blocks=num_blocks)
    for name, placed in split.tensors.items():
        holders = placed.layout.mesh.holders
        assert len(holders) >= num_blocks * split.is_weight(name)
        assert torch.equal(read_tensor(split, name), read_tensor(one, name)), name
        for holder in holders:
            part = split.part(name, holder)
            into = torch.full_like(part, torch.nan)
            split.read_part(name, holder, into)
            assert torch.equal(part, into)


def test_copies_of_assets_are_durable(tmp_path: Path, fsyncs: Fsyncs) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "also").mkdir(parents=True)
    (source / "tokenizer.json").write_bytes(b"{}")
    (source / "also" / "config.json").write_bytes(b"[]")
    copied = copy_assets(source, target, Files(), also=("also/config.json",))
    assert copied == ["tokenizer.json", "also/config.json"]
    assert fsyncs.synced[target] == {"tokenizer.json", "also"}
    assert fsyncs.synced[target / "also"] == {"config.json"}
    for name in copied:
        assert (target / name).read_bytes() in fsyncs.synced.values()
