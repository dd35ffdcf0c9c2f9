"""Calibration on real ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.calibrate import main
from scripts.calibration import calibrate, predicted_s
from tests.launch import REPOSITORY
from tests.pool import WorkerPool
from torchtitan_lite.redistribute.cost import CPU, Costs


def calibrated() -> tuple[str, list[float]]:
    """Return the fitted figures and their errors on some steps, on every rank."""
    samples, costs = calibrate(3, torch.device("cpu"), shapes=[(64, 64), (512, 512)])
    return repr(costs), [predicted_s(sample.step, costs) for sample in samples]


@pytest.mark.matrix
def test_ranks_fit_the_same_figures(pools: Callable[[int], WorkerPool]) -> None:
    actual = pools(4).run(calibrated)
    assert all(one == actual[0] for one in actual)
    assert all(seconds > 0 for seconds in actual[0][1])


@pytest.mark.matrix
def test_the_command_writes_a_file_and_a_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["--nproc-per-node=2", "-m", "scripts.calibrate", f"--out={path}"]
    run = subprocess.run(
        [*launcher, *command, "--device=cpu", "--turns=1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("predictions are within 2 times") == 2
    costs = Costs.load(path)
    assert costs.piece_s != CPU.piece_s and costs.between == CPU.between


def test_a_single_process_reports_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["--out", str(tmp_path / "costs.json")]) == 2
    output = capsys.readouterr().err
    assert "torchrun --nproc-per-node" in output and len(output.splitlines()) == 1
    assert not list(tmp_path.iterdir())
