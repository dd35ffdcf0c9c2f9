"""Folders of runs in shared memory, and the locks of their ranks."""

import fcntl
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_lite.checkpoint.shared_memory import folder as folder_module
from torchtitan_lite.checkpoint.shared_memory.folder import (
    OWN,
    RankLock,
    free_run,
    list_runs,
    shared_memory_folder,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.serving.publish.pins import SlotLock

_HOLD = """
import sys, time
from pathlib import Path
from torchtitan_lite.checkpoint.shared_memory.folder import RankLock
assert RankLock(Path(sys.argv[1]), 0).try_acquire()
print("held", flush=True)
time.sleep(200)
"""


def test_runs_are_listed_and_freed(tmp_path: Path) -> None:
    assert list_runs(base=tmp_path) == []
    run_id = secrets.token_hex(16)
    folder = shared_memory_folder(run_id, base=tmp_path)
    assert shared_memory_folder(run_id, base=tmp_path) == folder
    assert (folder.stat().st_mode & 0o777) == 0o700
    Region.create(folder, 1, {}, 1 << 20).close()
    lock = RankLock(folder, 1)
    assert lock.try_acquire()
    (run,) = list_runs(base=tmp_path)
    assert (run.run_id, run.ranks[OWN], run.owners) == (run_id, (1,), {(OWN, 1): os.getpid()})
    assert run.bytes >= 3 << 20
    with pytest.raises(CheckpointError, match="still writes"):
        free_run(run_id, base=tmp_path)
    lock.release()
    assert free_run(run_id, base=tmp_path) >= 3 << 20
    assert list_runs(base=tmp_path) == []
    with pytest.raises(CheckpointError, match="holds shared memory"):
        free_run(run_id, base=tmp_path)


def test_a_run_that_ends_while_runs_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, lasting = "a" * 32, "b" * 32
    for run_id in (ending, lasting):
        shared_memory_folder(run_id, base=tmp_path)
    read_files = folder_module._rank_files

    def remove_and_read(folder: Path, kind: str, suffix: str) -> dict[int, Path]:
        if folder.name == ending and folder.exists():
            folder.rmdir()
        return read_files(folder, kind, suffix)

    monkeypatch.setattr(folder_module, "_rank_files", remove_and_read)
    assert [run.run_id for run in list_runs(base=tmp_path)] == [lasting]


def test_folders_of_other_users_and_invalid_ids_are_rejected(tmp_path: Path) -> None:
    for wrong in ("", "../" * 11, "A" * 32, "a" * 31):
        with pytest.raises(CheckpointError, match="32 digits"):
            shared_memory_folder(wrong, base=tmp_path)
    run_id = "a" * 32
    folder = shared_memory_folder(run_id, base=tmp_path)
    folder.parent.chmod(0o755)
    with pytest.raises(CheckpointError, match="mode 755"):
        shared_memory_folder(run_id, base=tmp_path)
    folder.rmdir()
    folder.parent.rmdir()
    folder.parent.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="no folder"):
        shared_memory_folder(run_id, base=tmp_path)


def test_a_lock_is_released_when_its_process_exits(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        lock = RankLock(tmp_path, 0)
        assert lock.owner() == holder.pid
        started = time.monotonic()
        assert not lock.wait(0.1)
        assert 0.1 <= time.monotonic() - started < 20
        holder.kill()
        assert lock.wait(30) and lock.owner() is None
        assert lock.acquire(0) and lock.owner() == os.getpid()
        assert not RankLock(tmp_path, 0).try_acquire()
        lock.release()
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()


def test_a_lock_on_a_removed_file_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (RankLock(tmp_path, 0) for _ in range(2))
    assert first.try_acquire()
    lock, calls = fcntl.flock, 0

    def remove_before_the_first_call(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            first.path.unlink()
            first.release()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_before_the_first_call)
    assert second.try_acquire()
    assert second.path.exists() and not RankLock(tmp_path, 0).try_acquire()
    second.release()


def test_a_released_lock_is_free_despite_a_forked_process(tmp_path: Path) -> None:
    lock = RankLock(tmp_path, 0)
    assert lock.try_acquire()
    assert lock._descriptor is not None
    # A fork shares the open file, as this does.
    forked = os.dup(lock._descriptor)
    lock.release()
    assert RankLock(tmp_path, 0).owner() is None
    os.close(forked)


def test_a_lock_is_released_once(tmp_path: Path) -> None:
    """Its descriptor may belong to another file by then."""
    locks: list[RankLock | SlotLock] = [
        RankLock(tmp_path, 0), SlotLock(tmp_path / "slot", exclusive=True),
    ]  # fmt: skip
    for lock in locks:
        assert lock.try_acquire()
        lock.release()
        assert lock.try_acquire()
        lock.release()
        lock.release()
