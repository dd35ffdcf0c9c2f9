"""Real writer processes: saves, failures, flushes, and what they leave behind."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.harness.launch import wait_until
from tests.harness.ranks import REPOSITORY
from tests.harness.snapshots import orphan, snapshot, trainers, verify
from torchtitan_lite.checkpoint.background import writer as writer_module
from torchtitan_lite.checkpoint.background.channel import WriterChannel, WriterSettings
from torchtitan_lite.checkpoint.background.flush import VisibleRanks
from torchtitan_lite.checkpoint.background.process import BackgroundProcess, WriterProcess
from torchtitan_lite.checkpoint.background.save import RankSave
from torchtitan_lite.checkpoint.background.writer import Writer
from torchtitan_lite.checkpoint.shared_memory.folder import RankLock
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.checkpoint.storage.safetensors_file import TokenBucket
from torchtitan_lite.core.log import logger

_LIMITED = 'ulimit -f {}; exec "{}" -m torchtitan_lite.checkpoint.background "$0"'


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of shared memory."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-"))
    yield made
    shutil.rmtree(made)


def _ends(*writers: WriterProcess, timeout_s: float = 60) -> None:
    for writer in writers:
        assert writer._process is not None
        assert writer._process.wait(timeout_s) == 0


def _steps_of(responses: list[dict[str, Any]], what: str) -> list[int]:
    """Return the steps that a writer reported as `what`."""
    return [output[what] for output in responses if what in output]


def _begun(root: Path) -> None:
    """Block until a writer has begun a file."""
    wait_until(lambda: list(root.glob("*/*/*.safetensors")), 60)


def _steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize(("world_size", "large"), [(1, 3000), (2, 12800), (2, 1 << 20)])
def test_saves_are_complete_and_old_ones_are_deleted(
    tmp_path: Path, world_size: int, large: int
) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, world_size, large_elements=large) as run:
        run.start(keep_latest_k=2)
        for step in (1, 2, 3):
            run.snapshot(step % 3, step)
            run.save(step % 3, step)
            output = run.writers[0].wait_for("committed", 60)
            assert [*_steps_of(output, "written"), *_steps_of(output, "committed")] == [step, step]
        run.writers[0].close(free=True)
        assert not run.regions[0].path.exists()
    assert _steps(root) == ["step-2", "step-3"]
    manifest = verify(root / "step-3")
    assert manifest["tensors"]["model.none"]["boxes"] == []
    assert manifest["layouts"] == [{"shards": world_size}]


def test_a_killed_trainer_loses_no_complete_step(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 2) as run:
        # Writers must not wait for any of these timeouts, which exceed the time limit here.
        run.start(bytes_per_s=1.0, others_s=200.0, preemption_grace_s=200.0)
        run.snapshot(0, 7)
        run.snapshot(1, 8)
        run.regions[0].begin(2, 9)
        run.disconnect()
        _ends(*run.writers)
    verify(root / "step-8")
    assert _steps(root) == ["step-8"]


def test_one_killed_trainer_flushes_all_ranks(tmp_path: Path) -> None:
    """The others run and wait for it; rank 1 completes a step while the flush is decided."""
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 3) as run:
        run.start(others_s=60.0, preemption_grace_s=120.0)
        run.snapshot(0, 7)
        snapshot(run.regions[1], 1, 8)
        snapshot(run.regions[2], 1, 8)
        orphan(run.writers[1])
        time.sleep(0.2)
        snapshot(run.regions[0], 1, 8)
        assert 8 in _steps_of(run.writers[0].wait_for("committed", 60), "committed")
        assert 8 in _steps_of(run.writers[2].wait_for("written", 60), "written")
        _ends(run.writers[1])
        assert run.writers[0].alive and run.writers[2].alive
    verify(root / "step-8")


def test_a_lagging_rank_yields_an_older_common_step(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 2) as run:
        run.start()
        run.snapshot(0, 7)
        snapshot(run.regions[1], 1, 8)
        run.disconnect()
        _ends(*run.writers)
    verify(root / "step-7")


def test_another_writer_replaces_a_killed_leader(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 2) as run:
        run.start()
        run.snapshot(0, 7)
        assert run.writers[0].pid is not None
        os.kill(run.writers[0].pid, signal.SIGKILL)
        assert run.writers[0].wait_for("ready", 60) == [] and not run.writers[0].alive
        assert not run.writers[0].save(0, 7)
        orphan(run.writers[1])
        _ends(run.writers[1])
        verify(root / "step-7")
        run.writers[0].start()
        assert run.writers[0].wait_for("ready", 60) and run.writers[0].alive


def test_regions_on_other_machines_yield_every_newer_step(tmp_path: Path) -> None:
    """Two machines are two folders: rank 1 lacks the newest step."""
    root = tmp_path / "checkpoint"
    here, there = tmp_path / "here", tmp_path / "there"
    run_id = secrets.token_hex(16)
    for base in (here, there):
        base.mkdir()
    with (
        trainers(here, root, 2, run_id=run_id) as first,
        trainers(there, root, 2, run_id=run_id) as second,
    ):
        first.regions.pop().unlink()
        second.regions.pop(0).unlink()
        for run in (first, second):
            run.start(preemption_grace_s=120.0)
            run.snapshot(0, 6)
            run.snapshot(1, 7)
        first.snapshot(2, 8)
        first.disconnect()
        second.disconnect()
        _ends(*second.writers)
        storage = open_storage(str(root))
        wait_until(storage.steps, 60)
        # Otherwise it would wait for the other rank's step 8.
        assert first.writers[0].pid is not None and first.writers[0].alive
        os.kill(first.writers[0].pid, signal.SIGKILL)
    assert storage.steps() == [7]
    verify(root / "step-7")


def test_a_flush_retries_until_the_grace_period_ends(tmp_path: Path) -> None:
    root = tmp_path / "place" / "checkpoint"
    (tmp_path / "place").write_text("in the way")
    with trainers(tmp_path, root, 2) as run:
        run.start()
        run.snapshot(0, 7)
        run.disconnect()
        time.sleep(0.5)
        (tmp_path / "place").unlink()
        _ends(*run.writers)
    verify(root / "step-7")


def test_a_committed_step_is_not_written_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 1) as run:
        run.start()
        run.snapshot(0, 7)
        run.save(0, 7)
        run.writers[0].wait_for("committed", 60)
        before = (root / "step-7").stat().st_ino
        run.disconnect()
        _ends(run.writers[0])
        assert (root / "step-7").stat().st_ino == before


def test_a_successor_waits_for_the_flush(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 1) as run:
        run.start()
        lock = RankLock(run.folder, 0)
        assert lock.owner() == run.writers[0].pid
        run.snapshot(0, 7)
        run.disconnect()
        assert lock.wait(60)
        verify(root / "step-7")


_CHUNKS = 8 << 20
"""Elements written in several calls, between which a writer checks its time limit."""


def _slow(seconds: float, number: int) -> list[str]:
    """Return a writer whose first writes are slow."""
    arguments = ["slow", str(seconds), str(number)]
    return [sys.executable, "-m", "tests.unit.checkpoint.faulty_writer", *arguments]


@pytest.mark.parametrize(("grace_s", "slow", "stored"), [(0.4, 2, []), (60.0, 1, [7])])
def test_a_write_is_cancelled_when_the_grace_period_ends(
    tmp_path: Path, grace_s: float, slow: int, stored: list[int]
) -> None:
    """The grace period starts at the trainer's end."""
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 1, large_elements=_CHUNKS) as run:
        run.start(_slow(1.2, slow), preemption_grace_s=grace_s)
        run.snapshot(0, 7)
        run.regions[0].confirm(7)
        run.save(0, 7)
        run.disconnect()
        _ends(*run.writers)
    assert open_storage(str(root)).steps() == stored


@pytest.mark.matrix
def test_an_older_save_in_progress_leaves_time_for_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 1, large_elements=_CHUNKS) as run:
        # The writer detects the trainer's end between the two slow writes. The second takes
        # slightly more than half of the grace period.
        run.start(_slow(2.6, 2), preemption_grace_s=5.0)
        run.snapshot(0, 7)
        run.save(0, 7)
        _begun(root)
        run.snapshot(1, 8)
        run.regions[0].confirm(8)
        run.disconnect()
        _ends(*run.writers)
    assert _steps(root) == ["step-8"]


@pytest.mark.parametrize("how", ["requested", "decided"])
def test_a_flush_retries_until_storage_works(tmp_path: Path, how: str) -> None:
    """A storage error must not end a writer during a flush."""
    root = tmp_path / "place" / "checkpoint"
    (tmp_path / "place").write_text("in the way")
    with trainers(tmp_path, root, 2) as run:
        run.start()
        run.snapshot(0, 7)
        ranks = VisibleRanks(RankSave(run.regions[0], open_storage(str(root))))
        if how == "requested":
            ranks.request_save(7)
        else:
            orphan(run.writers[1])
        time.sleep(1.2)
        assert run.writers[0].alive
        (tmp_path / "place").unlink()
        assert 7 in _steps_of(run.writers[0].wait_for("committed", 60), "committed")
        ranks.close()
    verify(root / "step-7")


@contextmanager
def _pipes() -> Iterator[tuple[WriterChannel, WriterChannel, int]]:
    """Return the writer's end of its pipes, the trainer's end, and the descriptor into which the
    trainer writes its signals."""
    (orders, to_writer), (from_writer, responses), (signals, handler) = (os.pipe() for _ in "123")
    channel = WriterChannel(orders, responses)
    channel.listen_to_signals(signals)
    yield channel, WriterChannel(from_writer, to_writer), handler
    for descriptor in (orders, to_writer, from_writer, responses, signals, handler):
        os.close(descriptor)


def test_the_newest_step_of_a_hanging_trainer_is_written_before_an_older_request(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 1) as run, _pipes() as (channel, trainer, handler):
        run.snapshot(0, 7)
        run.snapshot(1, 8)
        save = RankSave(run.regions[0], open_storage(str(root)))
        VisibleRanks(save).request_save(7)
        os.write(handler, bytes([signal.SIGTERM]))
        settings = WriterSettings(preemption_grace_s=0.0)
        writer = threading.Thread(target=Writer(save, settings, channel).run, daemon=True)
        writer.start()
        while "committed" not in (response := trainer.next_order() or {}):
            pass
        trainer.send(stop=True)
        writer.join()
    assert response["committed"] == 8
    assert _steps(root) == ["step-8"]


@pytest.mark.parametrize(("step", "result"), [(7, "abandoned"), (8, "written")])
def test_only_the_newest_step_has_the_second_half_of_the_grace_period(
    step: int, result: str, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 1) as run, _pipes() as (channel, trainer, _):
        run.snapshot(0, 7)
        run.snapshot(1, 8)
        run.regions[0].confirm(8)
        save = RankSave(run.regions[0], open_storage(str(root)))
        channel.ended_at = time.monotonic() - 600
        writer = Writer(save, WriterSettings(preemption_grace_s=1000.0), channel)
        writer._carry_out({"save": {"slot": step - 7, "step": step}})
        response = trainer.next_order()
    assert response is not None and response.get(result) == step


def test_a_file_size_limit_fails_the_save_and_not_the_writer(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 2) as run:
        limited = ["bash", "-c", _LIMITED.format(20, sys.executable)]
        run.start(limited)
        for step in (1, 2):
            run.snapshot(step, step)
            run.save(step, step)
            reported = []
            for writer in run.writers:
                (output,) = [r for r in writer.wait_for("failed", 60) if "failed" in r]
                assert output["failed"] == step
                reported.append(output["error"])
            # The leader may remove the attempt before the other rank reaches its limit.
            assert any("File too large" in error for error in reported)
        assert all(writer.alive for writer in run.writers)
        assert open_storage(str(root)).steps() == []


def test_a_folder_that_can_be_created_later(tmp_path: Path) -> None:
    root = tmp_path / "place" / "checkpoint"
    (tmp_path / "place").write_text("in the way")
    with trainers(tmp_path, root, 1) as run:
        run.start()
        run.snapshot(0, 1)
        run.save(0, 1)
        (output,) = run.writers[0].wait_for("failed", 60)
        assert output["failed"] == 1 and "place" in output["error"]
        (tmp_path / "place").unlink()
        run.save(0, 1, token="again-1")
        assert 1 in _steps_of(run.writers[0].wait_for("committed", 60), "committed")
    verify(root / "step-1")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
@pytest.mark.parametrize("is_full", [True, False])
def test_saves_succeed_once_a_full_or_read_only_disk_recovers(
    tmp_path: Path, is_full: bool
) -> None:
    """Rank 1's failure fails the save for the leader too; then there is space again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=300k", "none", str(disk)]
    if subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        root = disk / "checkpoint"
        with trainers(tmp_path, root, 2) as run:
            run.start()
            if is_full:
                (disk / "filler").write_bytes(bytes(200 << 10))
            else:
                subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            run.snapshot(0, 1)
            run.save(0, 1)
            failed = [r for r in run.writers[0].wait_for("failed", 60) if "failed" in r]
            assert failed[0]["failed"] == 1
            assert ("No space left" if is_full else "Read-only") in failed[0]["error"]
            if is_full:
                (disk / "filler").unlink()
            else:
                subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
            run.snapshot(1, 2)
            run.save(1, 2)
            assert 2 in _steps_of(run.writers[0].wait_for("committed", 60), "committed")
        assert _steps(root) == ["step-2"]
        verify(root / "step-2")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_abandoned_save_stops_writing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 2) as run:
        run.start(bytes_per_s=1000.0)
        run.snapshot(0, 1)
        run.save(0, 1)
        _begun(root)
        for writer in run.writers:
            writer.abandon(1)
            assert _steps_of(writer.wait_for("abandoned", 60), "abandoned")[-1] == 1
        assert open_storage(str(root)).steps() == []
        # The leader does not wait for ranks that abandon the save.
        run.writers[0].close(timeout_s=60)
        assert not any(name.endswith(".safetensors") for _, _, n in os.walk(root) for name in n)


def test_the_leader_names_missing_ranks(tmp_path: Path) -> None:
    with trainers(tmp_path, tmp_path / "checkpoint", 2) as run:
        run.start(commit_timeout_s=0.2)
        run.snapshot(0, 1)
        run.writers[0].save(0, 1)
        output = run.writers[0].wait_for("failed", 60)
        assert "ranks [1] did not write their parts" in output[-1]["error"]
    assert _steps(tmp_path / "checkpoint") == []


def test_a_slot_that_changes_during_a_save_fails_it(tmp_path: Path) -> None:
    with trainers(tmp_path, tmp_path / "checkpoint", 1) as run:
        run.start(bytes_per_s=4e4)
        run.snapshot(0, 1)
        run.save(0, 1)
        _begun(tmp_path / "checkpoint")
        run.snapshot(0, 2)
        output = run.writers[0].wait_for("failed", 60)
        assert "holds step 2" in output[-1]["error"]


_NOISY = """
import os
print("a line", flush=True)
os.write(1, b"5\\nthe beginning of one")
from torchtitan_lite.checkpoint.background import __main__ as writer, save
write = save.RankSave.write
def noisy(*given, **named):
    print("from a library", flush=True)
    os.write(1, b"and past Python\\n")
    return write(*given, **named)
save.RankSave.write = noisy
import sys
sys.exit(writer.main(sys.argv[1]))
"""


def test_output_of_libraries_in_the_writer_is_not_a_response(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    with trainers(tmp_path, tmp_path / "checkpoint", 1) as run:
        run.start([sys.executable, "-c", _NOISY])
        run.snapshot(0, 1)
        run.save(0, 1)
        assert 1 in _steps_of(run.writers[0].wait_for("committed", 60), "committed")
    logger.removeHandler(caplog.handler)
    output = [r.getMessage() for r in caplog.records]
    assert output == ["A checkpoint process printed b'a line', which is not a response."]
    assert "from a library\nand past Python\n" in capfd.readouterr().err


@pytest.mark.parametrize("imports", ["", "import torch"])
def test_a_registered_filesystem_that_imports_torch_is_named_once(
    imports: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = "from fsspec.implementations.local import LocalFileSystem"
    vault = 'class Vault(LocalFileSystem):\n    protocol = ("vault",)'
    (tmp_path / "users_vault.py").write_text(f"{local}\n{imports}\n{vault}\n")
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with trainers(tmp_path, f"vault://{tmp_path}/checkpoint", 3) as run:
        run.start(storages={"vault": "users_vault:Vault"})
        run.snapshot(0, 1)
        run.save(0, 1)
        assert 1 in _steps_of(run.writers[0].wait_for("committed", 60), "committed")
    warning = "The filesystem of vault:// is defined in users_vault, which imports torch"
    assert capfd.readouterr().err.count(warning) == (1 if imports else 0)


def test_an_invalid_region_or_setting_is_reported(tmp_path: Path) -> None:
    writer = WriterProcess(tmp_path / "rank-00000.snapshots", WriterSettings())
    writer.start()
    (output,) = writer.wait_for("failed", 60)
    assert output["failed"] == -1 and "cannot be opened" in output["error"]
    writer.close()
    with pytest.raises(ValueError, match="Unknown settings of a writer: nicer"):
        WriterSettings.from_json({"nicer": 1})


def _private_bytes(pid: int, but: Path) -> int:
    """Return the private memory of a process, without the mapped region."""
    total, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            counts = str(but) not in line
        elif counts and first in ("Private_Clean:", "Private_Dirty:"):
            total += int(rest[0]) * 1024
    return total


def _handles(pid: int) -> int:
    time.sleep(0.01)
    return len(os.listdir(f"/proc/{pid}/fd"))


def _save_many(memory: Path, number: int) -> tuple[list[int], list[int]]:
    root = memory / "checkpoint"
    sizes, handles = [], []
    with trainers(memory, root, 1, large_elements=3000) as run:
        run.start(keep_latest_k=2)
        (writer,) = run.writers
        assert writer.pid is not None
        for step in range(1, number + 1):
            snapshot(run.regions[0], step % 3, step)
            writer.save(step % 3, step)
            assert step in _steps_of(writer.wait_for("committed", 60), "committed")
            if step % (number // 5) == 0:
                # The writer deletes the old checkpoint after it reports the new one, and looks for
                # others.
                wait_until(lambda: len(os.listdir(root)) <= 2, 60)
                sizes.append(_private_bytes(writer.pid, run.regions[0].path))
                handles.append(min(_handles(writer.pid) for _ in range(5)))
        before = set(os.listdir(run.folder))
    assert before == {"rank-00000.snapshots", "rank-00000.lock"}
    assert _steps(root) == sorted([f"step-{number - 1}", f"step-{number}"])
    return sizes, handles


def test_a_process_that_does_not_stop_is_killed_and_gone() -> None:
    process = BackgroundProcess(["sh", "-c", """echo '{"ready": 1}'; exec sleep 100"""], {})
    process.start()
    pid = process.pid
    assert pid is not None and process.wait_for("ready", 60)
    process.close(timeout_s=0.1)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.matrix)])
def test_many_saves_leak_nothing(number: int, memory: Path) -> None:
    sizes, handles = _save_many(memory, number)
    assert len(set(handles)) == 1
    assert sizes[-1] - sizes[0] < 256 << 10
    assert max(sizes) < 20 << 20


def test_the_writer_needs_no_torch_and_little_memory(tmp_path: Path) -> None:
    heavy = "torch", "numpy", "pydantic", "fsspec", "safetensors"
    code = (
        "import sys, torchtitan_lite.checkpoint.background.__main__, "
        "torchtitan_lite.checkpoint.background.process, "
        "torchtitan_lite.checkpoint.shared_memory.folder; "
        f"print(sorted(set({heavy}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    with trainers(tmp_path, tmp_path / "checkpoint", 1, large_elements=8 << 20) as run:
        run.start(bytes_per_s=40e6)
        run.regions[0].begin(0, 1)
        run.regions[0].complete(0, {})
        (writer,) = run.writers
        assert writer.pid is not None
        peak = _private_bytes(writer.pid, run.regions[0].path)
        run.save(0, 1)
        while not any("committed" in output for output in writer.responses()):
            peak = max(peak, _private_bytes(writer.pid, run.regions[0].path))
            time.sleep(0.01)
    assert 4 << 20 < peak < 20 << 20


class _OrderedChannel:
    """The channel of a trainer that stops its writer, with an order to abandon step 7."""

    ended = False
    ended_at: float | None = None

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.sent: list[dict[str, Any]] = []

    def poll(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        return self.orders

    def send(self, **message: Any) -> None:
        self.sent.append(message)


def _stopping_writer(*attempts: Any) -> Any:
    writer: Any = object.__new__(Writer)
    writer._channel = _OrderedChannel()
    writer._pending = {one.token: one for one in attempts}
    return writer


def test_an_order_to_abandon_precedes_a_commit() -> None:
    removed: list[tuple[int, bool, bool]] = []
    about = SimpleNamespace(is_leader=True)
    attempt = SimpleNamespace(step=7, token="t", save=SimpleNamespace(about=about))
    writer = _stopping_writer(attempt)
    writer._storage = SimpleNamespace(
        remove_attempts=lambda step, is_needed: removed.append(
            (step, is_needed("t"), is_needed("u"))
        )
    )
    writer._channel.orders.append({"abandon": 7})

    def commit() -> None:
        for token in list(writer._pending):
            del writer._pending[token]
            writer._channel.send(committed=token)

    writer._commit_complete = commit
    writer._finish(free=False)
    assert writer._channel.sent == [{"abandoned": 7, "token": "t"}]
    assert removed == [(7, False, True)] and writer._channel.orders == []


def test_what_is_urgent_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(writer_module, "reset_io_priority", lambda: calls.append("priority"))
    monkeypatch.setattr(writer_module, "flush", lambda save, **named: calls.append("flush"))
    writer = _stopping_writer()
    writer._rate, writer._save = TokenBucket(1.0), None
    writer._settings = WriterSettings()
    writer._remove_limits()
    assert calls == ["priority"] and writer._rate.bytes_per_s is None
    writer._channel.ended_at = 0.0
    writer._flush()
    assert calls == ["priority", "priority", "flush"]
