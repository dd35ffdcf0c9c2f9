"""The writer and its trainer killed at any operation, and power lost after any: storage shows the
newest committed step complete, and never a partial one."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.ranks import REPOSITORY
from tests.harness.snapshots import Trainers, verify
from tests.unit.checkpoint.faulty_writer import PowerLossDisk, RecordingFiles
from torchtitan_lite.checkpoint.background.save import (
    RankSave,
    attempt_token,
    delete_old_checkpoints,
)
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.posix import LocalStorage
from torchtitan_lite.checkpoint.storage.safetensors_file import TokenBucket

OPERATIONS = {"0": 54, "1": 28, "trainer": 32, "flush-0": 48, "flush-1": 28, "alone-1": 47}
"""Which process crashes, and its number of operations, at each of which it crashes once. "0" and
"1" are the writers of the ranks (0 leads), and "trainer" is the trainer of both, in two saves. With
"flush-", the second save is the flush after the trainer's death; with "alone-", one writer flushes
for the leader's writer too, which is dead."""
POINTS = [(victim, n) for victim, most in OPERATIONS.items() for n in range(1, most + 1)]
_ATTEMPTS = 3
"""The number of operations varies: if the other writer creates a folder first, the victim does
fewer."""
FAST = [point for i, point in enumerate(POINTS) if i % 31 == 7]


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state == "Z":
                break
            assert time.monotonic() < deadline, f"writer {pid} lives on"
            time.sleep(0.01)


def _run(base: Path, victim: str, crash_at: int) -> tuple[int, list[dict[str, int]]]:
    """Return the number of the victim's operations and the output of the trainer."""
    base.mkdir()
    arguments = ["trainer", str(base), str(base / "checkpoint"), victim, str(crash_at)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.faulty_writer", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -9, done.stderr.decode()
    output = [json.loads(line) for line in done.stdout.splitlines()]
    _wait_until_gone([line["writer"] for line in output if "writer" in line])
    count = base / f"count-{victim.rpartition('-')[2]}"
    return int(count.read_text()), output


def _kill_at(tmp_path: Path, victim: str, crash_at: int) -> None:
    done = 0
    for attempt in range(_ATTEMPTS):
        base = tmp_path / str(attempt)
        done, output = _run(base, victim, crash_at)
        if done == crash_at:
            break
    else:
        pytest.fail(f"{victim} does {done} operations, and was to die at {crash_at}")
    committed = max((line["committed"] for line in output if "committed" in line), default=0)
    if victim.startswith("flush-"):
        # Another writer completes the save for the dead one.
        committed = 2
    _check(base / "checkpoint", at_least=committed)


def _check(root: Path, at_least: int) -> list[int]:
    """Return the steps that are visible after recovery, after checking that each is complete."""
    storage = LocalStorage(root, Files())
    before = storage.steps()
    steps = storage.steps(repairs=True)
    attempts.recover(storage, "another start")
    assert storage.steps() == steps
    assert set(before) <= set(steps)
    assert max(steps, default=0) >= at_least
    for step in steps:
        verify(root / f"step-{step}")
    if root.exists():
        assert sorted(os.listdir(root)) == [f"step-{step}" for step in steps]
    return steps


@pytest.mark.parametrize("victim", OPERATIONS)
def test_all_operations_are_covered(tmp_path: Path, victim: str) -> None:
    done = 0
    for attempt in range(_ATTEMPTS):
        done, _ = _run(tmp_path / str(attempt), victim, crash_at=0)
        _check(tmp_path / str(attempt) / "checkpoint", at_least=2)
        if done == OPERATIONS[victim]:
            break
    assert done == OPERATIONS[victim]
    assert len(POINTS) >= 180


@pytest.mark.parametrize(("victim", "crash_at"), FAST)
def test_killed_at_an_operation(tmp_path: Path, victim: str, crash_at: int) -> None:
    _kill_at(tmp_path, victim, crash_at)


@pytest.mark.matrix
@pytest.mark.parametrize(("victim", "crash_at"), [p for p in POINTS if p not in FAST])
def test_killed_at_every_operation(tmp_path: Path, victim: str, crash_at: int) -> None:
    _kill_at(tmp_path, victim, crash_at)


@pytest.mark.parametrize("direct", [True, False])
def test_power_lost_after_every_operation(tmp_path: Path, direct: bool) -> None:
    """Save steps 1, 2 and 2 again, keeping one; a share of the unsynced data is lost."""
    base = tmp_path / "disk"
    base.mkdir()
    root = base / "checkpoint"
    files = RecordingFiles(base)
    storage = LocalStorage(root, files)
    run = Trainers(tmp_path, root, 2, large_elements=1500)
    saves = [RankSave(region, storage) for region in run.regions]
    committed_at = {}
    for attempt, step in enumerate((1, 2, 2)):
        run.snapshot(step, step)
        token = attempt_token(saves[0].about.generation_id, step, attempt)
        for save in saves:
            save.write(step, step, token, direct=direct, rate=TokenBucket(None))
        saves[0].commit(step, token, saves[0].announcements(step, token))
        committed_at[len(files.log)] = step
        delete_old_checkpoints(storage, step, keep_latest_k=1, keep_every=0)
    run.close()
    disk, committed = PowerLossDisk(base), 0
    for place, operation in enumerate(files.log, start=1):
        disk.replay(operation)
        committed = committed_at.get(place, committed)
        for number, share in enumerate((0.0, 1.0, 0.5, 0.5, 0.8)):
            actual = tmp_path / f"found-{place}-{number}"
            disk.after_crash(actual, share, seed=place * 10 + number)
            _check(actual / "checkpoint", at_least=committed)
    assert committed == 2 and len(files.log) > 60
