"""Conversion of a checkpoint to torchtitan's DCP format and back, by the command line."""

import json
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.harness.launch import SMALL, run
from tests.harness.ranks import run_command
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot, read_tensor
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.cli import main

CONFIG = "--config=configs/llama3_debug.toml"


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    snapshot = StoredSnapshot(*open_parent_storage(str(checkpoint)))
    return {name: read_tensor(snapshot, name) for name in snapshot.tensors}


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_round_trip(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = [*SMALL, "--checkpoint.enable=true"]
    first = [*saving, f"--job.dump_folder={tmp_path}/first", "--training.steps=2"]
    run(ranks, first, tmp_path / "log")
    checkpoint, dcp = tmp_path / "first" / "checkpoint" / "step-2", tmp_path / "dcp"
    assert main(["convert", "to-dcp", str(checkpoint), str(dcp)]) == 0
    dcp_to_torch_save(dcp, tmp_path / "dcp.pt")
    theirs = torch.load(tmp_path / "dcp.pt", weights_only=True)
    assert theirs["train_state"]["step"] == 2 and "lm_head.weight" in theirs
    groups = theirs["optimizer"]
    assert groups["param_groups.layers.0.attention.qkv_linear.wq.weight.lr"] > 0

    out = tmp_path / "converted"
    capsys.readouterr()
    # The weights fit, but would give other logits.
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    dims = manifest["config"]["model"]["dims"] | {"rope_theta": 5.0}
    stated = {name: value for name, value in dims.items() if value is not None}
    other = tmp_path / "other.toml"
    other.write_text(tomli_w.dumps({"model": {"flavor": "other", "dims": stated}}))
    assert (
        main(["convert", "from-dcp", str(dcp), str(out), f"--config={other}"]) == 1
        and not out.exists()
    )
    assert "rope_theta is 500000.0 there and 5.0 here" in capsys.readouterr().err
    assert main(["convert", "from-dcp", str(dcp), str(out), CONFIG]) == 0
    assert f"{out}/step-2" in capsys.readouterr().out
    before, after = tensors_of(checkpoint), tensors_of(out / "step-2")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    begun = [
        *saving,
        f"--job.dump_folder={tmp_path}/second",
        "--training.steps=3",
        f"--checkpoint.initial_load_path={out}/step-2",
        "--checkpoint.initial_load_model_only=false",
    ]
    run_command("train", *begun)
    assert (tmp_path / "second" / "checkpoint" / "step-3").is_dir()


@pytest.mark.matrix
def test_unsupported_folders_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "hf" / "model.safetensors")
    for folder, expected_text in (
        ("dcp", "torchtitan-lite convert from-dcp"),
        ("hf", "Hugging Face"),
    ):
        arguments = [
            *SMALL,
            f"--job.dump_folder={tmp_path}/out-{folder}",
            "--checkpoint.enable=true",
            f"--checkpoint.initial_load_path={tmp_path}/{folder}",
        ]
        log = run_command("train", *arguments, status=1)
        assert expected_text in log and "Traceback" not in log
