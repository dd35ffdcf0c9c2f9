"""Folders of weights: what is loaded, and the errors where nothing can be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.hugging_face import add_tokenizer, make_folder
from tests.harness.jobs import FIXTURE
from tests.unit.checkpoint.small_checkpoint import replace_manifest, write_checkpoint
from torchtitan_lite.checkpoint import to_record
from torchtitan_lite.checkpoint.convert.hugging_face.folder import save_assets
from torchtitan_lite.cli import main
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import CheckpointError, DataError, UserError
from torchtitan_lite.data.corpus import open_corpus
from torchtitan_lite.data.tokenizer import open_tokenizer
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.serving.inference import open_weights, stop_ids, tokenizer_of


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two steps of a checkpoint that declares to be the smallest Llama."""
    for step in (5, 12):
        write_checkpoint(tmp_path / "saved", step)
        record(tmp_path / "saved" / f"step-{step}", config_of(tmp_path))
    return tmp_path / "saved"


def config_of(folder: Path, **model: Any) -> dict[str, Any]:
    training = {"dataset_path": str(FIXTURE), "cache_folder": str(folder / "cache")}
    tables = {"model": {"flavor": "tiny", **model}, "training": training}
    return Config.model_validate(tables).model_dump(mode="json")


def record(folder: Path, config: dict[str, Any]) -> None:
    """Record this configuration in a checkpoint."""
    raw = json.loads((folder / "manifest.json").read_text())
    replace_manifest(folder, raw | {"config": config})


def test_a_checkpoint_folder_yields_its_newest_step(saved: Path, mesh: Mesh) -> None:
    newest = open_weights(f"{saved}/", mesh)
    assert newest.snapshot.where == f"{saved}/step-12"
    assert newest.spec.name == "llama3" and newest.spec.flavor == "tiny"
    assert newest.dtype == torch.float32
    assert open_weights(str(saved / "step-5"), mesh).snapshot.saved.step == 5


def test_convert_takes_the_newest_step_and_names_what_it_accepts(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "to-dcp", str(tmp_path / "none"), str(tmp_path / "dcp")]) == 1
    assert "contains no checkpoint. Give the folder of a step, " in capsys.readouterr().err
    # The small checkpoint holds no Llama, which is found out after the choice of the step.
    for folder in (saved, tmp_path):
        shutil.copytree(saved, tmp_path / "checkpoint", dirs_exist_ok=True)
        assert main(["convert", "to-hf", str(folder), str(tmp_path / "hf")]) == 1
        err = capsys.readouterr().err
        assert "step-12, the newest of 2 checkpoints" in err, err


def test_recorded_dims_take_precedence_over_a_changed_flavor(
    saved: Path,
    mesh: Mesh,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = to_record(Config.model_validate({"model": {"flavor": "tiny"}}))
    record(saved / "step-12", recorded)
    weights = open_weights(str(saved), mesh)
    assert weights.config.model.flavor == "tiny" and not weights.config.model.dims
    recorded["model"]["dims"] |= {"num_heads": 2, "num_kv_heads": 2}
    record(saved / "step-12", recorded)
    with caplog.at_level("WARNING", "torchtitan_lite"):
        weights = open_weights(str(saved), mesh)
    assert weights.spec.dims.num_heads == 2
    assert "trained as llama3 tiny with other dimensions" in caplog.text
    assert "num_heads is 2 there and" in caplog.text
    assert main(["convert", "to-dcp", f"{saved}/step-12", str(tmp_path / "dcp")]) == 1
    text = capsys.readouterr().err
    assert "num_heads is 2 there and" in text and "would give other logits" in text
    assert not (tmp_path / "dcp").exists()


def test_the_state_of_muon_is_not_exported_to_torchtitan(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"model": {"flavor": "tiny"}, "optimizer": {"name": "Muon"}}
    record(saved / "step-12", to_record(Config.model_validate(values)))
    assert main(["convert", "to-dcp", f"{saved}/step-12", str(tmp_path / "dcp")]) == 1
    assert 'optimizer.name = "Muon", for which torchtitan has no form' in capsys.readouterr().err
    assert not (tmp_path / "dcp").exists()


def test_the_tokenizer_next_to_the_checkpoints_is_preferred(
    saved: Path, mesh: Mesh, tmp_path: Path
) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", "llama"))
    save_assets(folder, str(saved))
    (saved / "assets" / "kept").touch()
    save_assets(folder, str(saved))
    assert (saved / "assets" / "kept").exists()
    (saved / "assets" / "tokenizer.json").write_text("another")
    save_assets(folder, str(saved))
    assert not (saved / "assets" / "kept").exists()
    save_assets(folder, "s3://bucket/checkpoint")
    record(saved / "step-12", config_of(tmp_path, hf_assets_path=str(tmp_path / "gone")))
    actual = tokenizer_of(open_weights(str(saved), mesh), None)
    assert actual.folder == saved / "assets"
    assert actual.fingerprint == open_tokenizer(str(folder), (), 64, tmp_path).fingerprint


def test_a_folder_without_a_checkpoint_is_named(saved: Path, mesh: Mesh, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError, match=f"{path} contains no checkpoint"):
            open_weights(str(path), mesh)
    record(saved / "step-12", {"model": {"flavour": "tiny"}})
    with pytest.raises(CheckpointError, match=r"manifest of .*step-12 is wrong at model.flavour"):
        open_weights(str(saved), mesh)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"config.json"):
        open_weights(str(tmp_path / "hf"), mesh)


def test_a_hugging_face_folder_is_read_directly(mesh: Mesh, tmp_path: Path) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "hf", "qwen3_moe", dtype=torch.bfloat16))
    weights = open_weights(str(folder), mesh)
    assert (weights.spec.name, weights.dtype) == ("qwen3", torch.bfloat16)
    assert weights.config.training.dtype == "bfloat16"
    tokenizer = tokenizer_of(weights, None).load()
    assert tokenizer.eos_id is not None
    settings = {"eos_token_id": [7, 9]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert stop_ids(tokenizer, folder) == {tokenizer.eos_id, 7, 9}
    (folder / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(DataError, match=r"generation_config.json is not JSON: .* column 18"):
        stop_ids(tokenizer, folder)
    (folder / "generation_config.json").unlink()
    assert stop_ids(tokenizer, folder) == {tokenizer.eos_id}


def test_the_tokenizer_of_the_run_is_used_or_requested(
    saved: Path, mesh: Mesh, tmp_path: Path
) -> None:
    weights = open_weights(str(saved), mesh)
    with pytest.raises(CheckpointError, match=r"step-12 was trained .* Give --tokenizer DIR"):
        tokenizer_of(weights, None)
    training, cache = weights.config.training, tmp_path / "cache"
    corpora = [open_corpus(one) for one in training.resolved_corpora()]
    trained = open_tokenizer(None, corpora, weights.spec.vocab_size, cache)
    assert tokenizer_of(weights, None) == trained
    shutil.copytree(trained.folder, tmp_path / "elsewhere")
    assert tokenizer_of(weights, str(tmp_path / "elsewhere")).fingerprint == trained.fingerprint
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no tokenizer.json"):
        tokenizer_of(weights, str(tmp_path))
    record(saved / "step-12", config_of(tmp_path, hf_assets_path=str(tmp_path / "gone")))
    with pytest.raises(CheckpointError, match=r"gone, with which .*step-12 was trained, has no"):
        tokenizer_of(open_weights(str(saved), mesh), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=a", "--top-p=0"], "top-p (0.0)"),
        (["--prompt=a", "--temperature=-1"], "temperature (-1.0)"),
        (["--prompt=a"], "Give --tokenizer DIR"),
    ],
)
def test_errors_of_generate(
    saved: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(saved), "--device=cpu", *arguments]) == 1
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["--prompt=a", "--max-new-tokens=0"], "'0' is not a whole number of at least 1"),
        (["--prompt=a", "--parallelism.context_parallel_degree=2"], "--tensor-parallel N"),
        (["--prompt=a", "--chatty"], "unrecognized arguments: --chatty"),
        (["--prompt=a", "--system=b"], "add --chat"),
    ],
)
def test_generate_rejects_invalid_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "somewhere", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--dataset NAME or --dataset-path FILES"),
        (["--dataset-path=nowhere/*.jsonl"], "validation.dataset_path"),
        (["--dataset=python_stdlib", "--validation.sede=3"], "validation.sede"),
        (["--dataset=python_stdlib", "--seq-len=long"], "seq_len"),
        (["--dataset=python_stdlib"], "Give --tokenizer DIR"),
    ],
)
def test_errors_of_evaluate(
    saved: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(saved), "--device=cpu", *arguments]) == 1
    assert message in capfd.readouterr().err
