"""Hugging Face folders that are damaged, incomplete, hostile or unsupported."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.hugging_face import add_tokenizer, make_folder, our_model
from tests.unit.conftest import Fsyncs
from torchtitan_lite.checkpoint.convert.hugging_face import snapshot
from torchtitan_lite.checkpoint.convert.hugging_face.export import check_target
from torchtitan_lite.checkpoint.convert.hugging_face.folder import (
    INDEX,
    HuggingFaceFolder,
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
from torchtitan_lite.training.run_config import config_from


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


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what both an import of a folder and a run of its model say; nothing is written."""
    out = path.parent / "out"
    assert main(["convert", "from-hf", str(path), str(out)]) == 1
    assert not out.exists()
    said = capsys.readouterr().err.partition("ERROR ")[2].strip()
    tables = {"model": {"flavor": "hf", "hf_assets_path": str(path)}}
    with pytest.raises(ConfigError) as caught:
        config_from(tables, "run.toml")
    assert said in str(caught.value)
    return said


@pytest.mark.parametrize("is_one_file", [True, False])
@pytest.mark.parametrize(
    ("key", "wanted", "message"),
    [
        ("num_hidden_layers", 10**9, "is 1000000000, but the weights beside it have 2"),
        ("num_hidden_layers", 3, "is 3, but the weights beside it have 2"),
        ("num_local_experts", 10**9, "is 1000000000, but the weights beside it have 4"),
        ("vocab_size", 10**30, "is 1000000000000000000000000000000, and at most"),
    ],
)
def test_sizes_are_compared_with_the_weights_and_the_memory(
    key: str,
    wanted: int,
    message: str,
    is_one_file: bool,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_one_file:
        (folder / INDEX).unlink()
        tensors: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
        save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", lambda values: values.update({key: wanted}))
    said = refusal(folder, capsys)
    assert said.startswith(f"{folder / 'config.json'}: {key} {message}")


def test_damaged_weights_do_not_prevent_a_run_that_does_not_load_them(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    tables = {"model": {"flavor": "hf", "hf_assets_path": str(folder)}}
    assert config_from(tables, "run.toml").model.name == "qwen3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "{} does not exist. Give a folder on this machine; hf download"),
        ("config.json", "{} is a file. Give its folder, "),
        ("model.gguf", "{} is a GGUF file, which is not supported. "),
        ("only_gguf", "{}/a.gguf is a GGUF file, which is not supported. "),
    ],
)
def test_paths_that_are_no_folder_of_safetensors_are_told_apart(
    name: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "only_gguf").mkdir()
    (folder / "only_gguf" / "a.gguf").write_bytes(b"GGUF")
    path = folder / name
    assert refusal(path, capsys).startswith(message.format(path))
    # Beside safetensors, it is not used.
    our_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", '{"version": "1.0"', "EOF while parsing an object at line 1 column 17"),
        ("tokenizer.json", "{}", "line 1 column 2"),
        ("tokenizer_config.json", '{"eos_token": ', "line 1 column 15"),
        ("tokenizer_config.json", "[]", "is not a JSON object"),
        ("generation_config.json", '{"eos_token_id": ', "damaged: .* line 1 column 18"),
        ("generation_config.json", "[]", "damaged: it is not a JSON object"),
        ("vocab.json", '{"a"', "damaged: .* line 1 column 5"),
        ("merges.txt", b"\xff", "damaged: .* byte 0xff in position 0"),
        ("chat_template.jinja", b"a\xff", "damaged: .* byte 0xff in position 1"),
    ],
)
def test_damaged_assets_are_named_before_anything_is_written(
    name: str, content: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tokenizer(folder)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    out = folder.parent / "out"
    assert main(["convert", "from-hf", str(folder), str(out)]) == 1
    assert not out.exists()
    assert re.search(f"{folder / name}.*{message}", capsys.readouterr().err)
    if "damaged" in message:
        with pytest.raises(DamagedCheckpoint, match=f"{folder / name} is {message}"):
            check_target(out, folder)


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
            "config.json: model_type is 'mixtral', and qwen3 or qwen3_moe is needed",
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
    one = HuggingFaceSnapshot(HuggingFaceFolder(*open_parent_storage(str(folder))), spec)
    split = HuggingFaceSnapshot(
        HuggingFaceFolder(*open_parent_storage(str(folder))), spec, num_blocks=num_blocks
    )
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
