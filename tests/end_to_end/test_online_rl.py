"""`python -m examples.online_rl`: a trainer and a sampler as separate jobs, either of which may be
killed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from examples.online_rl.rollouts import read_rollouts
from examples.online_rl.task import END, encode, reward
from tests.harness import launch
from tests.harness.ranks import REPOSITORY


def _start(folder: Path, steps: int) -> launch.Process:
    return launch.start(
        1,
        ["--out", str(folder), "--steps", str(steps)],
        folder.with_suffix(".log"),
        program=("-m", "examples.online_rl"),
    )


@contextmanager
def _running(folder: Path, steps: int) -> Iterator[launch.Process]:
    """Run the example until the end of the block. Its jobs die with it."""
    process = _start(folder, steps)
    try:
        yield process
    finally:
        launch.end(process)


def _run(folder: Path, steps: int) -> str:
    """Run the example until it ends, and return what it printed."""
    with _running(folder, steps) as process:
        assert process.wait(timeout=900) == 0, _logs(folder)
    return folder.with_suffix(".log").read_text()


def _logs(folder: Path) -> str:
    files = [folder.with_suffix(".log"), *folder.glob("*.log")]
    return "\n".join(file.read_text()[-4000:] for file in files if file.exists())


def _rollouts(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the trainer, after checking that step v + 1 has trained on version v,
    whose log probabilities it found bit by bit."""
    events = [event for event in launch.events_of(folder) if event["event"] == "rollouts"]
    assert [event["step"] for event in events] == [event["version"] + 1 for event in events]
    assert {event["mismatch"] for event in events} == {0.0}
    return events


def _kill(process: launch.Process, *jobs: str) -> None:
    """kill -9 jobs of the example."""
    found = [
        child
        for child in psutil.Process(process.pid).children()
        if set(jobs) & set(child.cmdline())
    ]
    assert len(found) == len(jobs)
    for child in found:
        child.send_signal(signal.SIGKILL)


def _wait_for_version(folder: Path, version: int, process: launch.Process) -> None:
    deadline = time.monotonic() + 300
    while not (folder / "rollouts" / f"version-{version}.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, _logs(folder)
        time.sleep(0.02)


def test_the_reward() -> None:
    assert reward("3+4=", [*encode("7"), END]) == 1.0
    assert reward("5+7=", [*encode("12"), END]) == 1.0
    assert reward("5+7=", [*encode("17"), END]) == pytest.approx(2 / 3)
    # Neither a missing end nor a leading zero is right.
    assert reward("3+4=", encode("777")) == pytest.approx(1 / 3)
    assert reward("3+4=", [*encode("07"), END]) == 0.0


@pytest.mark.matrix
def test_each_step_trains_on_the_version_before_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    text = _run(folder, steps=4)
    events = _rollouts(folder)
    assert [event["version"] for event in events] == [0, 1, 2, 3]
    assert text.count("rollouts  step ") == 4 and "restarts: 0 of the trainer" in text
    rollouts = read_rollouts(folder / "rollouts", 3)
    assert events[-1]["reward"] == rollouts.mean_reward
    assert any(log_prob < 0 for log_prob in rollouts.log_probs[0])


@pytest.mark.matrix
@pytest.mark.timeout(2400)
def test_kills_change_no_bit(tmp_path: Path) -> None:
    """Runs of 120 steps: one is not disturbed, in the other both jobs are killed, alone and
    together."""
    steps, plain, disturbed = 120, tmp_path / "plain", tmp_path / "disturbed"
    _run(plain, steps)
    with _running(disturbed, steps) as process:
        for version, jobs in ((20, ["torchtitan_lite"]), (40, ["examples.online_rl.sampler"]),
                              (60, ["torchtitan_lite", "examples.online_rl.sampler"])):  # fmt: skip
            _wait_for_version(disturbed, version, process)
            _kill(process, *jobs)
        assert process.wait(timeout=900) == 0, _logs(disturbed)
    printed = disturbed.with_suffix(".log").read_text()
    assert "restarts: 2 of the trainer, 2 of the sampler" in printed
    for folder in (plain, disturbed):
        assert [event["version"] for event in _rollouts(folder)] == list(range(steps))
    for version in range(steps):
        name = f"version-{version}.json"
        texts = {(folder / "rollouts" / name).read_text() for folder in (plain, disturbed)}
        assert len(texts) == 1, name
    step = f"checkpoint/step-{steps}"
    expected = launch.saved_tensors(plain / step)
    found = launch.saved_tensors(disturbed / step)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_the_reward_rises(tmp_path: Path) -> None:
    """The whole example, and what the README says about its checkpoint."""
    folder = tmp_path / "run"
    with _running(folder, 300) as process:
        for version, job in ((100, "torchtitan_lite"), (200, "examples.online_rl.sampler")):
            _wait_for_version(folder, version, process)
            _kill(process, job)
        assert process.wait(timeout=900) == 0, _logs(folder)
    events = _rollouts(folder)
    assert len(events) == 300
    assert events[0]["reward"] < 0.15 and events[-1]["reward"] > 0.7
    assert events[0]["right"] < 0.05 and events[-1]["right"] > 0.5
    checkpoint = str(folder / "checkpoint")
    answer = tmp_path / "answer.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "torchtitan_lite", "generate", checkpoint),
            *("--custom-import", "examples.online_rl.extension", "--temperature", "0"),
            *("--prompt", "5+7=", "--json", str(answer)),
        ],
        check=True,
        cwd=REPOSITORY,
        timeout=120,
    )
    (text,) = json.loads(answer.read_text())
    assert text["text"] == "12" and text["ended_by"] == "stop"
