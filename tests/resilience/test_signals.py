"""SIGTERM and SIGINT: all ranks finish the step, save, and exit; the run resumes bitwise."""

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.harness import launch


def arguments_of(folder: Path) -> list[str]:
    arguments = [*launch.SMALL, f"--job.dump_folder={folder}", "--checkpoint.interval=100000"]
    return [*arguments, "--checkpoint.enable_first_step_checkpoint=false"]


def stop_one_rank(folder: Path, log: Path, number: signal.Signals) -> int:
    """Send a signal to one rank of a run, and return the step at which the run saved and exited."""
    arguments = arguments_of(folder)
    process = launch.start(2, [*arguments, "--training.steps=100000"], log)
    try:
        launch.wait_for_step(folder, 3, process, log)
        launch.ranks_of(process)[1].send_signal(number)
        assert process.wait(timeout=120) == 0, log.read_text()[-4000:]
    finally:
        launch.end(process)
    (left,) = (folder / "checkpoint").glob("step-*")
    step = json.loads((left / "manifest.json").read_text())["step"]
    assert step >= 3
    assert f"Stopped at step {step}" in log.read_text()
    assert launch.steps_of(folder)[-1]["step"] == step
    return step


def test_sigterm_to_one_rank_saves(tmp_path: Path) -> None:
    stop_one_rank(tmp_path / "run", tmp_path / "log", signal.SIGTERM)


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_a_signal_to_one_rank_saves_and_resumes_bitwise(
    number: signal.Signals, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    step = stop_one_rank(folder, log, number)
    arguments, last = arguments_of(folder), f"--training.steps={step + 3}"
    resumed = launch.run(2, [*arguments, last], log)
    assert f"Resumed from {folder}/checkpoint/step-{step}" in resumed
    uninterrupted = tmp_path / "uninterrupted"
    launch.run(
        2, [*arguments, last, f"--job.dump_folder={uninterrupted}"], tmp_path / "uninterrupted.log"
    )
    expected = launch.saved_tensors(uninterrupted / "checkpoint" / f"step-{step + 3}")
    actual = launch.saved_tensors(folder / "checkpoint" / f"step-{step + 3}")
    assert actual.keys() == expected.keys()
    assert len(expected) > 50
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.matrix
def test_a_signal_to_torchrun_saves(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    arguments = [*launch.SMALL, f"--job.dump_folder={folder}", "--training.steps=100000"]
    process = launch.start(2, arguments, log, as_user=True)
    try:
        launch.wait_for_step(folder, 2, process, log)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    finally:
        launch.end(process)
    last_step = launch.steps_of(folder)[-1]["step"]
    assert (folder / "checkpoint" / f"step-{last_step}" / "manifest.json").is_file()
