"""Conversions: byte-identical round trips, interruptions, resumptions, full disks."""

import errno
import json
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.hugging_face import (
    add_tokenizer,
    family_rows,
    in_transformers,
    make_folder,
    make_model,
    tensors_of,
    tokens,
)
from tests.harness.ranks import exit_status
from tests.unit.checkpoint.faulty_writer import CrashingFiles
from torchtitan_lite.checkpoint import recorded_config
from torchtitan_lite.checkpoint.convert.hugging_face import save_assets, to_hf
from torchtitan_lite.checkpoint.convert.hugging_face.folder import HuggingFaceFolder
from torchtitan_lite.checkpoint.convert.hugging_face.from_hf import HuggingFaceImport
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.convert.hugging_face.to_hf import HuggingFaceExport
from torchtitan_lite.checkpoint.snapshots import Snapshot, StoredSnapshot, read_tensor
from torchtitan_lite.checkpoint.storage.base import open_parent_storage, open_storage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.tensors import tensor_bytes
from torchtitan_lite.checkpoint.verification import verify
from torchtitan_lite.cli import main
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.models import hugging_face_dims, model_spec, read_hugging_face_config

Convert = Callable[[list[str]], int]


def import_folder(folder: Path, out: Path, *options: str) -> Path:
    assert main(["convert", "from-hf", str(folder), str(out), *options]) == 0
    return out / "step-0"


def export_checkpoint(checkpoint: Path, out: Path, *options: str) -> Path:
    assert main(["convert", "to-hf", str(checkpoint), str(out), *options]) == 0
    return out


@pytest.mark.parametrize("family", family_rows())
def test_a_round_trip_is_byte_identical(family: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", family, dtype=torch.bfloat16)
    checkpoint = import_folder(folder, tmp_path / "ours")
    exported = export_checkpoint(checkpoint, tmp_path / "back", "--max-shard-size", "70KB")
    before, after = tensors_of(folder), tensors_of(exported)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # The balancing bias stays in float32.
        wanted = torch.float32 if "correction_bias" in name else torch.bfloat16
        assert tensor.dtype == after[name].dtype == wanted
        assert torch.equal(tensor, after[name]), name
    config = json.loads((folder / "config.json").read_bytes())
    exported_config = json.loads((exported / "config.json").read_bytes())
    assert {key: exported_config[key] for key in config} == config
    assert len(list(exported.glob("*.safetensors"))) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "ours"]


@pytest.mark.parametrize(
    "family",
    [
        *("llama_tied_stretched", "deepseek_v2", "gpt_oss"),
        *(
            pytest.param(family, marks=pytest.mark.matrix)
            for family in ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "llama4", "qwen3_next")
        ),
    ],
)
def test_an_export_generates_the_same_text_with_transformers(family: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", family)
    exported = export_checkpoint(import_folder(folder, tmp_path / "ours"), tmp_path / "back")
    # Without the original folder, config.json is written by this project.
    (tmp_path / "ours" / "assets" / "config.json").unlink()
    bare = export_checkpoint(tmp_path / "ours" / "step-0", tmp_path / "bare")
    prompt = tokens()[:, :9]
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    theirs: Any = make_model(family)
    expected = theirs.generate(prompt, **settings)
    for one in (exported, bare):
        loaded = in_transformers("AutoModelForCausalLM", one)
        assert torch.equal(loaded.generate(prompt, **settings), expected)


@pytest.mark.parametrize("family", family_rows())
def test_an_export_has_the_keys_that_transformers_4_reads(family: str, tmp_path: Path) -> None:
    """Checked once with release 4.57: it computes the logits of release 5 from such folders, and
    others from those that release 5 writes."""
    folder = add_tokenizer(make_folder(tmp_path / "hf", family))
    written = folder / "tokenizer_config.json"
    values = json.loads(written.read_bytes())
    assert values["tokenizer_class"] == "TokenizersBackend"
    written.write_text(json.dumps({**values, "extra_special_tokens": ["<x>"]}))
    exported = export_checkpoint(import_folder(folder, tmp_path / "ours"), tmp_path / "back")
    before, after = (json.loads((one / "config.json").read_bytes()) for one in (folder, exported))
    if family.startswith("mellum"):
        # Release 4 does not have it, and release 5 takes them for its tables.
        assert not {"rope_scaling", "rope_theta", "rope_local_base_freq"} & after.keys()
    elif "rope_parameters" not in before:
        # All models of the architecture have the same rotations.
        assert not [key for key in (*before, *after) if "rope" in key]
    else:
        _assert_former_rope(family, before["rope_parameters"], after)
    assert after["torch_dtype"] == after["dtype"] == before["dtype"]
    if family.startswith("qwen3_moe"):
        assert after["num_experts"] == before["num_local_experts"]
    # Release 5 reads the same as before.
    read = [in_transformers("AutoConfig", one) for one in (folder, exported)]
    ropes = [dict(getattr(one, "rope_parameters", {})) for one in read]
    assert _has_all(ropes[1], ropes[0])
    tokenizer = json.loads((exported / "tokenizer_config.json").read_bytes())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["additional_special_tokens"] == ["<x>"]
    assert "extra_special_tokens" not in tokenizer
    assert in_transformers("AutoTokenizer", exported).extra_special_tokens == ["<x>"]


def _assert_former_rope(family: str, rope: dict[str, Any], after: dict[str, Any]) -> None:
    if "full_attention" in rope:
        of_windows, rope = rope["sliding_attention"], rope["full_attention"]
        bases = [after.get("rope_local_base_freq", after["rope_theta"]), of_windows["rope_theta"]]
        assert bases[0] == bases[1]
    # GPT-NeoX has names of its own.
    theta, share = ("rope_theta", "partial_rotary_factor")
    if family.startswith("gpt_neox"):
        theta, share = ("rotary_emb_base", "rotary_pct")
    assert after[theta] == rope["rope_theta"]
    if rope["rope_type"] == "default":
        assert after["rope_scaling"] is None
    else:
        apart = ("rope_theta", "partial_rotary_factor")
        given = {k: v for k, v in rope.items() if k not in apart and v is not None}
        assert {key: after["rope_scaling"][key] for key in given} == given
    assert after.get(share, 1.0) == rope.get("partial_rotary_factor", 1.0)


def _has_all(table: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a table has what another one sets; defaults may be there, too."""
    return all(
        _has_all(table[key], value) if isinstance(value, dict) else table[key] == value
        for key, value in wanted.items()
        if value is not None
    )


def test_the_dtype_is_converted_and_small_shards_hold_one_tensor(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "llama")
    checkpoint = import_folder(folder, tmp_path / "ours", "--dtype", "bf16", "--workers", "1")
    assert verify(*open_parent_storage(str(checkpoint))) == []
    exported = export_checkpoint(
        checkpoint, tmp_path / "back", "--dtype", "fp32", "--max-shard-size", "1KB"
    )
    before, after = tensors_of(folder), tensors_of(exported)
    assert all(torch.equal(after[n], before[n].bfloat16().float()) for n in before)
    for file in exported.glob("*.safetensors"):
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 1000 or len(sizes) == 1
    assert json.loads((exported / "config.json").read_bytes())["dtype"] == "float32"


def test_a_checkpoint_describes_its_model_without_the_folder(tmp_path: Path) -> None:
    checkpoint = import_folder(make_folder(tmp_path / "hf", "mixtral"), tmp_path / "ours")
    manifest = StoredSnapshot(*open_parent_storage(str(checkpoint))).manifest
    model = recorded_config(manifest.config, "it").model
    assert (model.name, model.flavor, model.dims["num_layers"]) == ("mixtral", "hf", 2)
    assert model.hf_assets_path == str(tmp_path / "ours" / "assets")
    assert model_spec(model).num_experts == 4


class BreakingFiles(Files):
    """Fails from the n-th weight file on, with an error or an interrupt."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.left, self.error, self.written = number, error, []

    def create(self, path: Path, *, direct: bool = False) -> int:
        # A single way to write, so that each file is counted once.
        if direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        if path.suffix == ".safetensors":
            self.left -= 1
            self.written.append(path.name)
        return super().create(path)

    def pwritev(self, descriptor: int, contents: Any, offset: int) -> None:
        if self.left <= 0:
            os.pwrite(descriptor, b"the beginning", offset)
            raise self.error
        super().pwritev(descriptor, contents, offset)


def conversions(folder: Path, tmp_path: Path) -> dict[str, Callable[[Files], Any]]:
    """Return both conversions into `tmp_path`, with several files each."""
    family, dims = hugging_face_dims(read_hugging_face_config(folder))
    model = ModelConfig(name=family, flavor="hf", dims=dims)
    spec = model_spec(model)

    def importer(files: Files) -> HuggingFaceImport:
        return HuggingFaceImport(
            source=HuggingFaceSnapshot(
                HuggingFaceFolder(*open_parent_storage(str(folder))), spec, block_bytes=1 << 16
            ),
            storage=open_storage(str(tmp_path / "in"), files),
            dtype=None,
            run_config={"model": model.model_dump()},
            file_bytes=60_000,
        )

    def exporter(files: Files) -> HuggingFaceExport:
        source = StoredSnapshot(*open_parent_storage(str(tmp_path / "ours" / "step-0")))
        target = tmp_path / "out"
        return HuggingFaceExport(source, target, spec, max_shard_bytes=60_000, files=files)

    return {"in": importer, "out": exporter}


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_full_disk_leaves_no_files(way: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "qwen3")
    import_folder(folder, tmp_path / "ours")
    before = sorted(tmp_path.rglob("*"))
    files = BreakingFiles(3, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        conversions(folder, tmp_path)[way](files).run(num_workers=2, written=lambda count: None)
    left = set(tmp_path.rglob("*")) - set(before)
    # The checkpoint folder itself may stay.
    assert left <= {tmp_path / "in"}


@pytest.mark.parametrize("way", ["in", "out"])
def test_an_interrupted_conversion_resumes(way: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "qwen3")
    import_folder(folder, tmp_path / "ours")
    make = conversions(folder, tmp_path)[way]
    files = BreakingFiles(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        make(files).run(num_workers=1, written=lambda count: None)
    assert not (tmp_path / "in" / "step-0").exists() and not (tmp_path / "out").exists()
    counted: list[int] = []
    again = BreakingFiles(1000, KeyboardInterrupt())
    conversion = make(again)
    num_bytes_left = conversion.num_bytes_left
    conversion.run(num_workers=1, written=counted.append)
    assert sum(counted) == conversion.num_bytes
    # Of an export, what was written before counts from the start.
    assert way == "in" or counted[0] == conversion.num_bytes - num_bytes_left
    *done, broken = files.written[:3]
    assert broken in again.written and not set(done) & set(again.written)
    exported = tmp_path / "out"
    if way == "in":
        assert verify(*open_parent_storage(str(tmp_path / "in" / "step-0"))) == []
        exported = export_checkpoint(tmp_path / "in" / "step-0", tmp_path / "back")
    before, after = tensors_of(folder), tensors_of(exported)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def killed_conversion(folder: Path, tmp_path: Path, way: str, operation: int) -> None:
    """Convert in a separate process that is killed at the n-th file operation."""
    conversions(folder, tmp_path)[way](CrashingFiles(operation)).run(
        num_workers=2, written=lambda count: None
    )


@pytest.mark.parametrize("way", ["in", pytest.param("out", marks=pytest.mark.matrix)])
def test_a_killed_conversion_resumes(way: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "mixtral")
    import_folder(folder, tmp_path / "ours")
    assert exit_status(killed_conversion, folder, tmp_path, way, 40) == -signal.SIGKILL
    assert not (tmp_path / "in" / "step-0").exists() and not (tmp_path / "out").exists()
    conversion = conversions(folder, tmp_path)[way](Files())
    assert 0 < conversion.num_bytes_left < conversion.num_bytes
    conversion.run(num_workers=2, written=lambda count: None)
    exported = tmp_path / "out"
    if way == "in":
        exported = export_checkpoint(tmp_path / "in" / "step-0", tmp_path / "back")
    before, after = tensors_of(folder), tensors_of(exported)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_another_conversion_does_not_resume_from_these_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "qwen3")
    make = conversions(folder, tmp_path)["in"]
    with pytest.raises(KeyboardInterrupt):
        make(BreakingFiles(3, KeyboardInterrupt())).run(num_workers=1, written=lambda count: None)
    shard = sorted(folder.glob("*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    again = BreakingFiles(1000, KeyboardInterrupt())
    make(again).run(num_workers=1, written=lambda count: None)
    assert "rank-00000.safetensors" in again.written
    assert os.listdir(tmp_path / "in") == ["step-0"]


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "llama")
    checkpoint = import_folder(folder, tmp_path / "ours")
    assert main(["convert", "from-hf", str(folder), str(tmp_path / "ours")]) == 1
    assert main(["convert", "to-hf", str(checkpoint), str(folder)]) == 1
    assert main(["convert", "from-hf", str(tmp_path), str(tmp_path / "other")]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_insufficient_space_is_detected_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "hf", "llama")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert main(["convert", "from-hf", str(folder), str(tmp_path / "ours")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_two_processes_cannot_write_one_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "llama")
    import_folder(folder, tmp_path / "ours")
    make = conversions(folder, tmp_path)["out"]
    rejected: list[str] = []

    def meanwhile(count: int) -> None:
        if not rejected:
            with pytest.raises(CheckpointError, match="Another process is writing") as caught:
                make(Files()).run(num_workers=1, written=lambda count: None)
            rejected.append(str(caught.value))

    make(Files()).run(num_workers=1, written=meanwhile)
    assert rejected and tensors_of(tmp_path / "out").keys() == tensors_of(folder).keys()


class WeakMemory(bytearray):
    """A memoryview source that supports weak references."""


def test_only_one_tensor_at_a_time_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "hf", "mixtral")
    import_folder(folder, tmp_path / "ours")
    alive: list[weakref.ref[WeakMemory]] = []

    def watched(source: Snapshot, name: str) -> torch.Tensor:
        assert not [one for one in alive if one() is not None], name
        tensor = read_tensor(source, name)
        # Memory that reports when its last view is released.
        memory = WeakMemory(tensor_bytes(tensor))
        alive.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)

    export = conversions(folder, tmp_path)["out"](Files())
    monkeypatch.setattr(to_hf, "read_tensor", watched)
    export.run(num_workers=1, written=lambda count: None)
    assert len(alive) > 20


def test_values_out_of_the_range_of_float16_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "hf", "llama")
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(iter(tensors))
    tensors[name].view(-1)[3] = 1e5
    save_file(tensors, shard, metadata={"format": "pt"})
    arguments = [str(folder), str(tmp_path / "ours"), "--dtype", "fp16"]
    assert main(["convert", "from-hf", *arguments]) == 1
    assert "has values that overflow float16" in capsys.readouterr().err
    assert os.listdir(tmp_path / "ours") == []


def test_a_generation_config_of_another_model_is_harmless(tmp_path: Path) -> None:
    checkpoint = import_folder(make_folder(tmp_path / "hf", "llama"), tmp_path / "ours")
    for number, content in enumerate(["{", '{"architectures": ["GPT2LMHeadModel"]}']):
        assets = tmp_path / f"assets_{number}"
        assets.mkdir()
        (assets / "config.json").write_text(content)
        exported = export_checkpoint(
            checkpoint, tmp_path / f"out_{number}", "--assets", str(assets)
        )
        config = json.loads((exported / "config.json").read_bytes())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["eos_token_id"] is None


@pytest.mark.parametrize("option", ["out", "assets"])
def test_urls_are_rejected_where_folders_are_required(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path), "s3://bucket/out"]
    if option == "assets":
        arguments = [str(tmp_path), str(tmp_path / "out"), "--assets", "s3://bucket/assets"]
    assert main(["convert", "to-hf", *arguments]) == 2
    assert "is a URL; a folder on this machine is needed" in capsys.readouterr().err


def test_further_templates_are_kept_and_exported(tmp_path: Path) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", "llama"))
    template = folder / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    exported = export_checkpoint(import_folder(folder, tmp_path / "ours"), tmp_path / "back")
    for copy in (tmp_path / "ours" / "assets", exported):
        assert (copy / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    saved = tmp_path / "run"
    saved.mkdir()
    save_assets(folder, str(saved))
    template.write_text("{{ documents }}")
    save_assets(folder, str(saved))
    kept = saved / "assets" / "additional_chat_templates" / "tool_use.jinja"
    assert kept.read_text() == "{{ documents }}"
