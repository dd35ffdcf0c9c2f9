"""One run per folder: who may take a lease, on this machine, from other machines, and in object
stores."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from torchtitan_lite import lease_file, run_lease
from torchtitan_lite.lease_file import LeaseFile, open_lease_file
from torchtitan_lite.run_lease import (
    FolderInUse,
    LeaseHolder,
    LeasePlaces,
    RunLease,
    lease_places,
    taken_over,
)

_NAME = "lease.json"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals and timeouts in hundredths of a second."""
    monkeypatch.delenv("TORCHTITAN_LITE_SUPERVISOR", raising=False)
    for kind in (lease_file._LocalFile, lease_file._StoredFile):
        monkeypatch.setattr(kind, "renew_s", 0.05)
        monkeypatch.setattr(kind, "lost_s", 0.5)
    monkeypatch.setattr(run_lease, "_SETTLE_S", 0.05)
    monkeypatch.setattr(run_lease, "_RETRY_S", 0.02)


@pytest.fixture(params=["folder", "object store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path)
        return
    url = f"memory://{tmp_path}"
    yield url
    with suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(str(tmp_path), recursive=True)


def lease_in(folder: str, lost: list[str] | None = None) -> RunLease:
    places = LeasePlaces(held=(open_lease_file(folder, _NAME),), other=lambda: ())
    return RunLease(places, on_loss=([] if lost is None else lost).append)


def acquire(lease: RunLease, *, waits: bool = False) -> RunLease:
    lease.acquire(waits=waits, tick=lambda: None)
    return lease


def stored(file: LeaseFile) -> dict[str, Any]:
    sight = file.look()
    assert sight is not None
    return json.loads(sight.content)


def put(folder: str, **changes: Any) -> LeaseFile:
    """Write the lease of a process that differs from this one."""
    file = open_lease_file(folder, _NAME)
    holder = LeaseHolder(
        instance="another",
        token="a",
        host="node7",
        machine=run_lease.this_machine(),
        pid=os.getpid(),
        stop_pid=4242,
        started_ticks=run_lease.start_ticks(os.getpid()) or 0,
        since_s=time.time(),
    )
    file.replace(json.dumps(asdict(replace(holder, **changes))).encode())
    return file


def test_a_folder_in_use_is_refused_with_its_holder(folder: str) -> None:
    put(folder)
    with pytest.raises(FolderInUse) as caught:
        acquire(lease_in(folder))
    text = str(caught.value)
    assert text.startswith(f"{folder} is in use by process 4242 on node7 since 2")
    assert "kill -INT 4242" in text and "last sign of life 0 s ago" in text


def test_a_lease_ends_with_its_holder(folder: str) -> None:
    lease = acquire(lease_in(folder))
    with pytest.raises(FolderInUse):
        acquire(lease_in(folder))
    lease.release()
    assert open_lease_file(folder, _NAME).look() is None
    acquire(lease_in(folder)).release()


def test_a_killed_holder_on_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from torchtitan_lite.lease_file import open_lease_file\n"
        "from torchtitan_lite.run_lease import LeasePlaces, RunLease\n"
        "file = open_lease_file(sys.argv[1], 'lease.json')\n"
        "lease = RunLease(LeasePlaces(held=(file,), other=lambda: ()), on_loss=print)\n"
        "lease.acquire(waits=False, tick=lambda: None)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(FolderInUse, match=f"process {process.pid} on"):
            acquire(lease_in(str(tmp_path)))
        process.kill()
        # Not waited for yet: it is a zombie.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        began_s = time.monotonic()
        acquire(lease_in(str(tmp_path))).release()
        assert time.monotonic() - began_s < 0.4


def test_a_reused_process_id_does_not_count(folder: str) -> None:
    put(folder, started_ticks=1)
    acquire(lease_in(folder)).release()


def test_a_holder_on_another_machine_counts_while_it_renews(folder: str) -> None:
    file = put(folder, machine="elsewhere")
    sight = file.look()
    assert sight is not None
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.05):
            file.renew(sight.content)

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(FolderInUse, match="node7"):
        acquire(lease_in(folder))
    stop.set()
    thread.join()
    began_s = time.monotonic()
    lease = acquire(lease_in(folder))
    # A machine that was lost is replaced after the time without a renewal, and no earlier.
    assert 0.3 < time.monotonic() - began_s < 5
    lease.release()


def test_a_holder_lost_long_ago_is_replaced_at_once(tmp_path: Path) -> None:
    put(str(tmp_path), machine="elsewhere")
    os.utime(tmp_path / _NAME, (time.time() - 60, time.time() - 60))
    began_s = time.monotonic()
    acquire(lease_in(str(tmp_path))).release()
    assert time.monotonic() - began_s < 0.4


def test_a_restarted_run_takes_its_own_lease_over(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_LITE_SUPERVISOR", "77 a-run")
    lost: list[str] = []
    first = acquire(lease_in(folder, lost))
    second = acquire(lease_in(folder, lost))
    time.sleep(0.3)
    assert lost == []
    first.release()
    assert stored(open_lease_file(folder, _NAME))["stop_pid"] == 77
    second.release()
    assert open_lease_file(folder, _NAME).look() is None


def test_a_run_that_was_taken_over_is_told(folder: str) -> None:
    lost: list[str] = []
    lease = acquire(lease_in(folder, lost))
    put(folder, machine="elsewhere")
    deadline_s = time.monotonic() + 5
    while not lost and time.monotonic() < deadline_s:
        time.sleep(0.01)
    where = f"{folder}/{_NAME}"
    assert lost == [f"{where} was taken over by process 4242 on node7: this run stops writing."]
    assert taken_over([where]) == lost[0]
    lease.release()
    # It does not remove the lease of the other.
    assert stored(open_lease_file(folder, _NAME))["host"] == "node7"


def test_writers_may_finish_while_a_successor_on_this_machine_waits(folder: str) -> None:
    put(folder)
    assert taken_over([f"{folder}/{_NAME}"]) == ""
    assert taken_over([f"{folder}/none.json"]) == ""


def test_a_removed_lease_is_written_again(folder: str) -> None:
    lease = acquire(lease_in(folder))
    file = open_lease_file(folder, _NAME)
    file.remove()
    deadline_s = time.monotonic() + 5
    while file.look() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with pytest.raises(FolderInUse):
        acquire(lease_in(folder))
    lease.release()


def test_waiting_ends_with_the_other_run(folder: str) -> None:
    lease = acquire(lease_in(folder))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(acquire, lease_in(folder), waits=True)
        time.sleep(0.2)
        assert not waiting.done()
        lease.release()
        waiting.result(timeout=5).release()


@pytest.mark.parametrize("locks_work", [True, False])
@pytest.mark.parametrize("is_stale", [True, False])
def test_one_of_many_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks_work: bool, is_stale: bool
) -> None:
    if not locks_work:

        def fail(*arguments: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", fail)
    if is_stale:
        put(str(tmp_path), started_ticks=1)
    leases = [lease_in(str(tmp_path)) for _ in range(16)]
    barrier = threading.Barrier(len(leases))

    def compete(lease: RunLease) -> bool:
        barrier.wait()
        try:
            acquire(lease)
        except FolderInUse:
            return False
        return True

    with ThreadPoolExecutor(len(leases)) as pool:
        won = list(pool.map(compete, leases))
    # Without locks, those that take a stale lease over at the same moment overwrite each other,
    # and all but the last one are told.
    assert sum(won) == 1 if locks_work or not is_stale else sum(won) >= 1
    for lease in leases:
        lease.release()


def test_a_filesystem_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    lease = acquire(lease_in(str(tmp_path)))
    with pytest.raises(FolderInUse):
        acquire(lease_in(str(tmp_path)))
    lease.release()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    acquire(lease_in(str(tmp_path))).release()
    assert "A second run in the same place is not noticed" in caplog.text
    assert "lease.json cannot be written: [Errno 28]" in caplog.text


def test_a_storage_that_fsspec_does_not_know_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = lease_places(tmp_path, "counted://bucket/run", None)
    acquire(RunLease(places, on_loss=lambda reason: None)).release()
    assert "counted://bucket/run is of a storage without leases" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": 1}', b"\xff"])
def test_a_damaged_lease_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / _NAME).write_bytes(content)
    os.utime(tmp_path / _NAME, (time.time() - 60, time.time() - 60))
    acquire(lease_in(str(tmp_path))).release()


def test_replicas_and_a_run_without_them_exclude_each_other(tmp_path: Path) -> None:
    def lease(replica: int | None) -> RunLease:
        places = lease_places(tmp_path, str(tmp_path / "checkpoint"), replica)
        return RunLease(places, on_loss=lambda reason: None)

    first, second = acquire(lease(0)), acquire(lease(1))
    for taken in (0, 1, None):
        with pytest.raises(FolderInUse):
            acquire(lease(taken))
    first.release()
    second.release()
    whole = acquire(lease(None))
    with pytest.raises(FolderInUse):
        acquire(lease(2))
    whole.release()
    acquire(lease(2)).release()


def test_checkpoints_outside_of_the_folder_have_a_lease(tmp_path: Path) -> None:
    root = str(tmp_path / "shared")

    def lease(name: str, replica: int | None) -> RunLease:
        return RunLease(lease_places(tmp_path / name, root, replica), on_loss=lambda reason: None)

    first = acquire(lease("a", None))
    with pytest.raises(FolderInUse, match="shared is in use"):
        acquire(lease("b", None))
    # It left nothing in its own folder.
    assert not (tmp_path / "b" / _NAME).exists()
    first.release()
