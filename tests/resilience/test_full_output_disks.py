"""Runs whose dump folder is on a disk that becomes full, and on one that becomes read-only."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.harness.tolerances import FAULTS_FLOAT64
from torchtitan_lite.tools.report.samples import check_samples

pytestmark = pytest.mark.matrix

_STEPS, _FULL_AT, _FREED_AT = 36, 4, 28


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(mounted)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounts a small tmpfs")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)


def _fill(disk: Path) -> Path:
    """Fill a disk to its last byte, and return the file that does."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            while True:
                try:
                    file.write(bytes(size))
                except OSError:
                    break
    assert shutil.disk_usage(disk).free == 0
    return ballast


def _arguments(tmp_path: Path, run: Path) -> list[str]:
    return [
        *launch.SMALL,
        f"--job.dump_folder={run}",
        f"--checkpoint.folder={tmp_path / 'checkpoints' / run.parent.name}",
        f"--training.steps={_STEPS}",
        "--training.dtype=float64",
        "--checkpoint.interval=50",
        "--metrics.log_freq=1",
        "--metrics.enable_tensorboard=true",
        "--metrics.save_for_all_ranks=true",
        "--debug.sample_ledger=true",
    ]


def _wait_for_printed_step(log: Path, step: int, process: launch.Process) -> None:
    deadline = time.monotonic() + 120
    while f"step {step}/" not in log.read_text():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.02)


def _check_files(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """Check that the files of a run, or of a replica, hold each step once and in order. Returns
    the leader's events."""
    for name in ["metrics.jsonl", *(f"metrics_rank_{k}.jsonl" for k in range(1, num_ranks))]:
        lines = (folder / name).read_text().splitlines(keepends=True)
        assert all(line.endswith("\n") for line in lines)
        steps = [line["step"] for line in map(json.loads, lines) if "event" not in line]
        assert steps == list(range(1, _STEPS + 1)), name
    _check_tensorboard(folder / "tb")
    launch.time_accounting_of(folder)
    return launch.events_of(folder)


def _check_tensorboard(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = EventAccumulator(str(folder))
    files.Reload()
    assert [one.step for one in files.Scalars("loss/train")] == list(range(1, _STEPS + 1))


def _check_state(tmp_path: Path, run: Path) -> None:
    """Check that the final state equals that of an undisturbed run."""
    undisturbed = tmp_path / "undisturbed" / "run"
    launch.run(1, _arguments(tmp_path, undisturbed), tmp_path / "undisturbed.log")
    expected, actual = (
        launch.saved_tensors(tmp_path / "checkpoints" / folder.parent.name / f"step-{_STEPS}")
        for folder in (undisturbed, run)
    )
    by_name = [
        {key.partition(":")[2]: value for key, value in one.items()} for one in (expected, actual)
    ]
    assert by_name[0].keys() == by_name[1].keys()
    for name, tensor in by_name[0].items():
        torch.testing.assert_close(by_name[1][name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_one_process_trains_on_and_completes_its_files(
    fault: str, tmp_path: Path, disk: Path
) -> None:
    run, log = disk / "run", tmp_path / "log"
    process = launch.start(
        1, _arguments(tmp_path, run), log, program=launch.FAULTY_PROGRAM, FAULTS="slow=0.03"
    )
    try:
        launch.wait_for_step(run, _FULL_AT, process, log)
        if fault == "full":
            ballast = _fill(disk)
        else:
            # Files that are open for writing forbid it: the old state is that of a new mount.
            subprocess.run(["mount", "-o", "remount,ro,force", str(disk)], check=False)
            if os.access(disk, os.W_OK):
                pytest.skip("this kernel does not remount a busy tmpfs read-only")
            ballast = None
        reached = launch.steps_of(run)[-1]["step"]
        _wait_for_printed_step(log, _FREED_AT, process)
        # The disk held at most the records that fit into its last page.
        assert launch.steps_of(run)[-1]["step"] <= reached + 12
        if ballast is not None:
            ballast.unlink()
        assert process.wait(timeout=120) == 0, log.read_text()[-4000:]
    finally:
        launch.end(process)
    text = log.read_text()
    assert text.count("cannot be written") == 1 and "Outputs can be written again" in text
    (event,) = [one for one in _check_files(run, 1) if one["event"] == "outputs_failed"]
    assert event["lost"] == 0 and event["written_late"] > 10 and event["seconds"] > 0.5
    assert check_samples(run).problems == []
    _check_state(tmp_path, run)


def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path: Path, disk: Path) -> None:
    run, log = disk / "run", tmp_path / "log"
    process = launch.start(
        1, _arguments(tmp_path, run), log, program=launch.FAULTY_PROGRAM, FAULTS="slow=0.02"
    )
    try:
        launch.wait_for_step(run, _FULL_AT, process, log)
        _fill(disk)
        assert process.wait(timeout=120) == 0, log.read_text()[-4000:]
    finally:
        launch.end(process)
    lost = re.search(r"metrics\.jsonl: (\d+) records not written \(No space left", log.read_text())
    assert lost is not None and int(lost[1]) > 20, log.read_text()[-3000:]
    # The last line is whole.
    assert launch.steps_of(run) and (run / "metrics.jsonl").read_bytes().endswith(b"\n")
    _check_state(tmp_path, run)


def _launch(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torchtitan_lite", "launch", "--replicas=2"]
    with log.open("wb") as file:
        return subprocess.Popen(
            [*command, "--nproc-per-replica=1", "--", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _rank_of(launcher: subprocess.Popen[bytes], replica: int) -> psutil.Process:
    for one in psutil.Process(launcher.pid).children(recursive=True):
        words = one.cmdline()
        if "torch.distributed.run" in words or "--fault_tolerance.replica_id" not in words:
            continue
        if words[words.index("--fault_tolerance.replica_id") + 1] == str(replica):
            return one
    raise AssertionError(f"replica {replica} does not run")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("is_killed", [False, True], ids=["trains on", "restarts"])
def test_replicas_train_on(is_killed: bool, tmp_path: Path, disk: Path) -> None:
    """The logs of the launcher and of its ranks are on the full disk, too. A replica that is killed
    meanwhile restarts; its lines in memory are lost, and the check of samples says so."""
    run, log = disk / "run", tmp_path / "log"
    process = _launch([*_arguments(tmp_path, run), "--training.steps=100000"], log)
    folders = [run / f"replica_00{number}" for number in (0, 1)]
    try:
        for folder in folders:
            launch.wait_for_step(folder, 5, process, log)
        ballast = _fill(disk)
        time.sleep(3)
        if is_killed:
            _rank_of(process, 1).kill()
            launch.wait_until(lambda: log.read_text().count("replica 1: started") == 2, 30)
            time.sleep(12)
        assert process.poll() is None, log.read_text()[-4000:]
        ballast.unlink()
        freed_at = time.time()
        for folder in folders:
            launch.wait_until(lambda folder=folder: _last_time(folder) > freed_at + 1, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
    losses: dict[int, float] = {}
    for folder in folders:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        assert all(line.endswith("\n") for line in lines)
        steps = [line for line in map(json.loads, lines) if "event" not in line]
        numbers = [line["step"] for line in steps]
        assert numbers == sorted(set(numbers))
        for line in steps:
            assert losses.setdefault(line["step"], line["loss"]) == pytest.approx(
                line["loss"], rel=FAULTS_FLOAT64
            )
    # A replica that restarts may begin to write when the disk accepts it.
    for folder in folders[: 1 if is_killed else 2]:
        assert any(one["event"] == "outputs_failed" for one in launch.events_of(folder))
    assert sorted(losses) == list(range(1, max(losses) + 1))
    problems = check_samples(run).problems
    assert all(one.endswith("are lost") for one in problems) if is_killed else not problems


def _last_time(folder: Path) -> float:
    """Return the time of the newest record of a step."""
    return max((step["time"] for step in launch.steps_of(folder)), default=0.0)
