"""Text generation and evaluation from a checkpoint, by the command line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.jobs import FIXTURE, run_job
from tests.harness.launch import SMALL
from tests.harness.ranks import REPOSITORY, WorkerPool, run_command
from torchtitan_lite.data.tokenizer import train_tokenizer

RUN = {
    "model.flavor": "tiny",
    "training.dtype": "float32",
    "training.steps": 1,
    "training.held_out_fraction": 0.3,
    "validation.enable": True,
    "checkpoint.enable": True,
    "checkpoint.async_mode": "disabled",
}


@pytest.fixture(scope="module")
def trained(pools: Callable[[int], WorkerPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that saved its last step."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    pools(1).run(run_job, folder, RUN)
    return folder


def test_text(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "texts.json"
    arguments = [
        f"{trained}/checkpoint",
        "--prompt=import os",
        "--max-new-tokens=16",
        "--top-p=0.9",
        "--device=cpu",
        f"--json={out}",
    ]
    text = run_command("generate", *arguments)
    (actual,) = json.loads(out.read_text())
    assert actual["prompt"] == "import os" and len(actual["ids"]) == 16
    assert "import os" + actual["text"] in text and "tokens/s" in text
    assert "Traceback" not in text


def test_loss(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "loss.json"
    arguments = [f"{trained}/checkpoint/step-1", "--device=cpu", f"--json={out}"]
    text = run_command("evaluate", *arguments)
    record = json.loads(out.read_text())
    lines = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    (logged_loss,) = [line["loss"] for line in lines if line.get("event") == "validation"]
    # Same model, data and kernels.
    assert record["loss"] == logged_loss
    assert (
        f"loss        {logged_loss:.6f}" in text
        and f"perplexity  {record['perplexity']:.4f}" in text
    )


def test_a_checkpoint_does_not_need_the_tokenizer_folder(tmp_path: Path) -> None:
    """The tokenizer's path is relative, and its folder is deleted after training."""
    (tmp_path / "start" / "tokenizer").mkdir(parents=True)
    train_tokenizer([FIXTURE.read_text()], 300).save(tmp_path / "start" / "tokenizer")
    arguments = (
        f"--config={REPOSITORY}/configs/llama3_debug.toml",
        *SMALL[1:],
        "--model.hf_assets_path=tokenizer",
        "--model.flavor=tiny",
        "--training.steps=1",
        "--checkpoint.enable=true",
        "--checkpoint.async_mode=disabled",
        "--job.dump_folder=run",
    )
    run_command("train", *arguments, folder=tmp_path / "start")
    checkpoints = tmp_path / "start" / "run" / "checkpoint"
    manifest = json.loads((checkpoints / "step-1" / "manifest.json").read_text())
    assert manifest["config"]["model"]["hf_assets_path"] == str(tmp_path / "start" / "tokenizer")
    shutil.rmtree(tmp_path / "start" / "tokenizer")
    moved = str(tmp_path / "moved")
    shutil.move(checkpoints, moved)
    text = run_command("generate", moved, "--prompt=import", "--max-new-tokens=4", "--device=cpu")
    assert "tokens/s" in text
    dataset = f"--dataset-path={FIXTURE}"
    assert "perplexity" in run_command("evaluate", moved, dataset, "--device=cpu", "--steps=1")
