"""One run per folder: who may take a lease, on this machine, from other machines, and in object
stores."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from tests.harness.launch import wait_until
from torchtitan_lite.core import lease_file, run_lease
from torchtitan_lite.core.lease_file import LeaseFile, _StoredFile, open_lease_file
from torchtitan_lite.core.run_lease import (
    FolderInUse,
    LeaseHolder,
    LeasePlaces,
    RunLease,
    lease_places,
    new_instance,
    occupant,
    taken_over,
)

_NAME = "lease.json"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals and timeouts in hundredths of a second."""
    for name in ("TORCHTITAN_LITE_SUPERVISOR", "TORCHTITAN_LITE_INSTANCE"):
        monkeypatch.delenv(name, raising=False)
    for kind in (lease_file._LocalFile, lease_file._StoredFile):
        monkeypatch.setattr(kind, "renew_s", 0.05)
        monkeypatch.setattr(kind, "lost_s", 0.5)
    monkeypatch.setattr(run_lease, "_SETTLE_S", 0.05)
    monkeypatch.setattr(lease_file, "_SETTLE_S", 0.05)
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


def lease_in(folder: str, lost: list[str] | None = None, *, instance: str = "") -> RunLease:
    file = open_lease_file(folder, _NAME)
    places = LeasePlaces(folder=Path("run"), held=(file,), other=lambda: ())
    on_loss = ([] if lost is None else lost).append
    return RunLease(places, instance or new_instance(), on_loss=on_loss)


def lease_of(folder: Path, root: str, replica: int | None) -> RunLease:
    places = lease_places(folder, root, replica)
    return RunLease(places, new_instance(), on_loss=lambda reason: None)


def acquire(lease: RunLease, *, waits: bool = False) -> RunLease:
    lease.acquire(waits=waits)
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
        folder="/elsewhere",
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
    sign = "renews its lease every" if "://" in folder else r"last sign of life \d+ s ago"
    assert "kill -INT 4242" in text and re.search(sign, text)


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
        "from torchtitan_lite.core.lease_file import open_lease_file\n"
        "from pathlib import Path\n"
        "from torchtitan_lite.core.run_lease import LeasePlaces, RunLease\n"
        "file = open_lease_file(sys.argv[1], 'lease.json')\n"
        "places = LeasePlaces(folder=Path(), held=(file,), other=lambda: ())\n"
        "RunLease(places, 'first', on_loss=print).acquire(waits=False)\n"
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


def test_the_loss_of_a_holder_is_waited_for_once(folder: str) -> None:
    file = put(folder, machine="elsewhere")
    sight = file.look()
    assert sight is not None and occupant(file, sight, "own") is None
    began_s = time.monotonic()
    assert occupant(file, sight, "own") is None
    assert time.monotonic() - began_s < 0.3


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
    first = acquire(lease_in(folder, lost, instance="a-run"))
    second = acquire(lease_in(folder, lost, instance="a-run"))
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
        monkeypatch.setattr(run_lease, "_SETTLE_S", 1.0)
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
    assert sum(won) == 1
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


def test_a_lease_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []

    def fsync(descriptor: int) -> None:
        assert not (tmp_path / _NAME).exists()
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    lease = acquire(lease_in(str(tmp_path)))
    assert (tmp_path / _NAME).read_bytes() in synced
    lease.release()


def test_a_storage_that_fsspec_does_not_know_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    acquire(lease_of(tmp_path, "counted://bucket/run", None)).release()
    assert "counted://bucket/run is of a storage without leases" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"pid": 1}', b"\xff"])
def test_a_damaged_lease_is_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / _NAME).write_bytes(content)
    os.utime(tmp_path / _NAME, (time.time() - 60, time.time() - 60))
    acquire(lease_in(str(tmp_path))).release()


def test_replicas_and_a_run_without_them_exclude_each_other(tmp_path: Path) -> None:
    def lease(replica: int | None) -> RunLease:
        return lease_of(tmp_path, str(tmp_path / "checkpoint"), replica)

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


@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize("second", [None, 0])
def test_checkpoints_outside_of_the_folder_have_a_lease(
    folder: str, tmp_path: Path, first: int | None, second: int | None
) -> None:
    root = f"{folder}/shared"
    held = acquire(lease_of(tmp_path / "a", root, first))
    with pytest.raises(FolderInUse, match="shared is in use"):
        acquire(lease_of(tmp_path / "b", root, second))
    # It left nothing in its own folder.
    assert not list((tmp_path / "b").rglob(_NAME))
    held.release()


def test_a_storage_that_hangs_does_not_end_the_other_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    lease = acquire(lease_of(tmp_path / "a", f"memory://{tmp_path}/root", None))

    def hang(self: object) -> None:
        hangs.wait(10)

    monkeypatch.setattr(lease_file._StoredFile, "look", hang)
    time.sleep(0.8)
    assert open_lease_file(str(tmp_path / "a"), _NAME).age_s() < 0.5
    hangs.set()
    lease.release()


def test_network_errors_of_a_client_do_not_end_the_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of botocore are no OSErrors."""
    lost: list[str] = []
    url = f"memory://{tmp_path}/root"
    lease = acquire(lease_in(url, lost))
    with monkeypatch.context() as patch:

        def fail(self: object, *arguments: object, **options: object) -> bytes:
            raise RuntimeError("EndpointConnectionError")

        patch.setattr(type(fsspec.filesystem("memory")), "cat_file", fail)
        time.sleep(0.2)
    put(url, machine="elsewhere")
    deadline_s = time.monotonic() + 5
    while not lost and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert lost
    lease.release()


@pytest.mark.parametrize(
    "error", [NotImplementedError(), OSError(errno.ENOSYS, "501"), TypeError()]
)
def test_a_store_without_conditional_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    kind = type(fsspec.filesystem("memory"))
    pipe_file = kind.pipe_file

    def without(self: Any, path: str, value: bytes, **options: Any) -> None:
        if options:
            raise error
        pipe_file(self, path, value)

    monkeypatch.setattr(kind, "pipe_file", without)
    url = f"memory://{tmp_path}/root"
    lease = acquire(lease_in(url))
    with pytest.raises(FolderInUse):
        acquire(lease_in(url))
    lease.release()


def test_a_refusal_needs_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(str(tmp_path))

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FolderInUse, match="last sign of life"):
        acquire(lease_in(str(tmp_path)))


def test_a_lease_that_was_not_taken_is_not_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost lease of another machine stays on a full disk, and saves elsewhere continue."""
    put(str(tmp_path), machine="elsewhere")
    os.utime(tmp_path / _NAME, (time.time() - 60, time.time() - 60))

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    lease = acquire(lease_in(str(tmp_path)))
    assert lease.places == () and taken_over(lease.places) == ""


def test_a_process_of_another_user_that_proc_hides_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(str(tmp_path))

    def not_permitted(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(run_lease, "start_ticks", lambda pid: None)
    monkeypatch.setattr(os, "kill", not_permitted)
    with pytest.raises(FolderInUse):
        acquire(lease_in(str(tmp_path)))


class _CachingStorage:
    """A storage whose client answers from its cache until that is invalidated."""

    def __init__(self) -> None:
        self.content = b"older"
        self._cached: bytes | None = None

    def invalidate_cache(self) -> None:
        self._cached = None

    def cat_file(self, path: str) -> bytes:
        self._cached = self._cached or self.content
        return self._cached

    def glob(self, path: str) -> list[str]:
        return [f"bucket/{self.cat_file(path).decode()}"]


def test_a_lease_in_a_store_is_looked_up_anew() -> None:
    file: Any = object.__new__(_StoredFile)
    file._fs, file._path = _CachingStorage(), "bucket/lease.json"
    for content in (b"older", b"newer"):
        file._fs.content = content
        sight = file.look()
        assert sight is not None and sight.content == content
    file._fs.content = b"newest"
    assert file.matching() == ["newest"]


@pytest.mark.parametrize(
    "damage", [{"pid": "4242"}, {"pid": None}, {"since_s": 5}, {"since_s": "now"}]
)
def test_a_lease_with_a_value_of_another_type_names_no_holder(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    sight = put(str(tmp_path)).look()
    assert sight is not None and run_lease._parse(sight) is not None
    sight = put(str(tmp_path), **damage).look()
    assert sight is not None and run_lease._parse(sight) is None


@pytest.mark.parametrize(("machine", "wins"), [("elsewhere", False), ("here", True)])
def test_after_the_loss_of_another_machine_the_last_to_take_its_lease_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, wins: bool
) -> None:
    """A lock may not reach that machine; on one machine it does, and nobody waits."""
    changes = {"machine": machine} if machine == "elsewhere" else {}
    file = put(str(tmp_path), **changes)
    lease = lease_in(str(tmp_path))
    monkeypatch.setattr(lease, "_require_free", lambda file: file.look())
    monkeypatch.setattr(run_lease.time, "sleep", lambda _: put(str(tmp_path), instance="third"))
    assert lease._take(file) is wins


def test_a_lease_that_is_damaged_while_it_is_held_is_lost(tmp_path: Path) -> None:
    lost: list[str] = []
    lease = acquire(lease_in(str(tmp_path), lost))
    (tmp_path / _NAME).write_bytes(b"{")
    wait_until(lambda: lost, 10)
    assert "was taken over" in lost[0]
    lease.release()


def test_a_renewal_that_a_release_precedes_does_not_write(tmp_path: Path) -> None:
    """The thread of the renewal has waited for the lock meanwhile."""
    waits = iter([False, True])
    released = SimpleNamespace(wait=lambda _: next(waits), is_set=lambda: True)
    file = SimpleNamespace(renew_s=1.0, look=lambda: pytest.fail("it looks"))
    held: Any = SimpleNamespace(file=file, _is_released=released, _renewing=threading.Lock())
    run_lease._HeldLease._renew(held, pytest.fail)
