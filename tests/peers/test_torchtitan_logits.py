"""Debug models against torchtitan 0.2.2's, through a DCP checkpoint in both directions."""

import json
from pathlib import Path

import pytest
import torch

from tests.harness.hugging_face import filled
from tests.harness.launch import SMALL
from tests.harness.ranks import run_command
from tests.harness.tolerances import LOGITS_FLOAT32
from tests.peers.environments import run_script
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.cli import main
from torchtitan_lite.models import model_spec
from torchtitan_lite.serving.inference.weights import config_of_snapshot

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1500)]
LENGTH = 96
ARGUMENTS = (*SMALL, "--model.flavor=debugmodel")


@pytest.mark.parametrize("mode", ["load", "save"])
@pytest.mark.parametrize("family", ["llama3", "llama4", "deepseek_v3"])
def test_logits_equal_those_of_torchtitan(family: str, mode: str, tmp_path: Path) -> None:
    arguments = (*ARGUMENTS, f"--model.name={family}")
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(0, 2048, (2, LENGTH), generator=generator)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens_BS.tolist()))
    dcp, run = tmp_path / "dcp", tmp_path / "run"
    step = run / "checkpoint" / "step-2"
    if mode == "load":
        saving = ("--checkpoint.enable=true", "--training.steps=2", f"--job.dump_folder={run}")
        run_command("train", *arguments, *saving)
        assert main(["convert", "to-dcp", str(step), str(dcp), "--torchtitan", "0.2"]) == 0
    run_script(
        "torchtitan",
        ("torchtitan==0.2.2", "triton"),
        "torchtitan_logits.py",
        tmp_path,
        family,
        "debugmodel",
        tmp_path / "tokens.json",
        dcp,
        mode,
    )
    if mode == "save":
        assert main(["convert", "from-dcp", str(dcp), str(run), *arguments]) == 0
        step = run / "step-0"
    theirs_BSV = torch.load(tmp_path / f"{mode}.pt", weights_only=True)
    snapshot = StoredSnapshot(*open_parent_storage(str(step)))
    model = filled(model_spec(config_of_snapshot(snapshot).model), snapshot).eval()
    samples = {
        "tokens_BS": tokens_BS,
        "positions_BS": torch.arange(LENGTH).repeat(2, 1),
        "rng_keys_B": torch.arange(2),
    }
    with torch.no_grad():
        ours_BSV = model(**samples)
    assert ours_BSV.std() > 0.01
    torch.testing.assert_close(ours_BSV, theirs_BSV.float(), atol=LOGITS_FLOAT32, rtol=0)
