"""Flushes of ranks on several machines, each of which sees only its own folder of shared memory."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.snapshots import Trainers, snapshot, trainers, verify
from tests.unit.checkpoint.faulty_writer import RecordingFiles, SlowFiles
from torchtitan_lite.checkpoint.background import flush as flushing
from torchtitan_lite.checkpoint.background.flush import (
    GracePeriod,
    SaveAttempt,
    flush,
    mark_last_writer,
)
from torchtitan_lite.checkpoint.background.save import RankSave, WriterGroup, attempt_token
from torchtitan_lite.checkpoint.history.fencing_tokens import FencingTokens, TokenClaim
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.posix import LocalStorage
from torchtitan_lite.checkpoint.storage.safetensors_file import TokenBucket


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Trainers]]:
    """Two machines with one rank each, and checkpoints in `tmp_path/shared/checkpoint`."""
    (tmp_path / "shared").mkdir()
    run_id, root = secrets.token_hex(16), tmp_path / "shared" / "checkpoint"
    with ExitStack() as stack:
        made = []
        for rank in range(2):
            base = tmp_path / f"machine-{rank}"
            base.mkdir()
            run = stack.enter_context(trainers(base, root, 2, run_id=run_id))
            run.regions.pop(1 - rank).unlink()
            made.append(run)
        yield made


def _flush(
    save: RankSave, pending: list[SaveAttempt] | None = None, grace_s: float = 60.0, **since: float
) -> list[int]:
    grace = GracePeriod(since.get("since", time.monotonic()), grace_s)
    return flush(save, pending=pending or [], direct=False, grace=grace, others_s=0.1)


def _write(save: RankSave, slot: int, step: int, token: str) -> None:
    save.write(slot, step, token, direct=False, rate=TokenBucket(None))


def _attempts(files: RecordingFiles) -> list[str]:
    """Return the attempts whose folders were created, in order."""
    names = [op[1].name for op in files.log if op[0] == "mkdir"]
    return [name for name in names if name.startswith(".writing-")]


def _save_of(run: Trainers, files: Files | None = None) -> RankSave:
    return RankSave(run.regions[0], LocalStorage(Path(run.root), files or Files()))


def _hold(run: Trainers, steps: tuple[int, ...], confirmed: int) -> None:
    for slot, step in enumerate(steps):
        snapshot(run.regions[0], slot, step)
    run.regions[0].confirm(confirmed)


def test_the_newest_step_is_committed_before_an_older_one_begins(machines: list[Trainers]) -> None:
    first, second = machines
    for run in machines:
        _hold(run, (6, 7, 8), confirmed=7)
    _write(_save_of(second), 2, 8, attempt_token("5e55", 8))
    files = RecordingFiles(Path(first.root).parent)
    assert _flush(_save_of(first, files)) == [8]
    # Rank 1 has created the folder.
    assert _attempts(files) == []
    verify(Path(first.root) / "step-8")


def test_steps_older_than_the_newest_common_one_are_not_written(machines: list[Trainers]) -> None:
    _, second = machines
    _hold(second, (6, 7, 8), confirmed=7)
    files = RecordingFiles(Path(second.root).parent)
    assert _flush(_save_of(second, files)) == []
    assert _attempts(files) == [".writing-step-8-5e55-8x1", ".writing-step-7-5e55-7x1"]


def test_no_write_begins_after_the_grace_period(machines: list[Trainers]) -> None:
    _, second = machines
    _hold(second, (6, 7, 8), confirmed=7)
    files = RecordingFiles(Path(second.root).parent)
    assert _flush(_save_of(second, files), grace_s=1.0, since=time.monotonic() - 1.5) == []
    assert _attempts(files) == []


def test_a_write_is_cancelled_when_the_grace_period_ends(machines: list[Trainers]) -> None:
    _, second = machines
    _hold(second, (7,), confirmed=7)
    _flush(_save_of(second, SlowFiles(1.1)), grace_s=1.0)
    assert os.listdir(Path(second.root) / ".writing-step-7-5e55-7x1" / "step-7") == []


@pytest.mark.parametrize("ordered", [(0,), (1,), (0, 1)])
def test_a_save_request_that_reached_only_some_ranks_is_completed(
    machines: list[Trainers], ordered: tuple[int, ...]
) -> None:
    """The other ranks complete it without writing existing files again."""
    token = attempt_token("5e55", 7)
    for run in machines:
        _hold(run, (6, 7), confirmed=6)
        run.start(preemption_grace_s=60.0)
    for rank in ordered:
        machines[rank].save(1, 7, token)
        assert any("written" in r for r in machines[rank].writers[0].wait_for("written", 60))
    folder = Path(machines[0].root) / f".writing-step-7-{token}" / "step-7"
    if len(ordered) == 1:
        before = {p.name: p.stat().st_ino for p in folder.glob("*.safetensors")}
        assert len(before) == 1
    else:
        output = machines[0].writers[0].wait_for("committed", 60)
        assert any("committed" in response for response in output)
        before = {}
    for run in machines:
        run.disconnect()
    for run in machines:
        process = run.writers[0]._process
        assert process is not None and process.wait(100) == 0
    assert open_storage(str(machines[0].root)).steps() == [7]
    verify(Path(machines[0].root) / "step-7")
    for name, inode in before.items():
        assert (Path(machines[0].root) / "step-7" / name).stat().st_ino == inode


def test_a_retry_that_only_some_ranks_wrote_counts_with_the_first_attempt(
    machines: list[Trainers],
) -> None:
    """The leader was asked to retry, and rank 1 was not."""
    first, second = machines
    for run in machines:
        _hold(run, (6, 7), confirmed=6)
    save, retry = _save_of(first), (7, attempt_token("5e55", 7, 2))
    _write(save, 1, *retry)
    _flush(_save_of(second))
    assert _flush(save, [retry]) == [7]
    verify(Path(first.root) / "step-7")


def test_machines_one_step_apart_save_the_common_step_of_hanging_trainers(
    machines: list[Trainers],
) -> None:
    first, second = machines
    _hold(first, (6, 7, 8), confirmed=7)
    _hold(second, (5, 6, 7), confirmed=6)
    for run in machines:
        run.start(preemption_grace_s=0.3)
        os.write(run.writers[0].signals_fd, bytes([15]))
    output = first.writers[0].wait_for("committed", 60)
    assert [r["committed"] for r in output if "committed" in r] == [7]
    verify(Path(first.root) / "step-7")
    # Otherwise it would wait for the other rank's step 8.
    assert first.writers[0].pid is not None
    os.kill(first.writers[0].pid, 9)


def test_the_last_writer_does_not_wait_for_parts_that_nobody_writes(
    machines: list[Trainers],
) -> None:
    first, second = machines
    _hold(first, (6, 7, 8), confirmed=7)
    _hold(second, (6, 7), confirmed=7)
    _write(_save_of(second), 1, 7, attempt_token("5e55", 7))
    mark_last_writer(first.regions[0].path)
    began_s = time.monotonic()
    assert _flush(_save_of(first), grace_s=20.0) == [7]
    assert time.monotonic() - began_s < 10, "it has waited for rank 1's part of step 8"
    verify(Path(first.root) / "step-7")


def test_a_writer_of_an_earlier_generation_that_was_the_last_does_not_matter(
    machines: list[Trainers],
) -> None:
    first, _ = machines
    _hold(first, (7,), confirmed=7)
    mark_last_writer(first.regions[0].path)
    (mark,) = first.folder.glob("last-*")
    mark.rename(mark.with_name("last-" + "0" * 32))
    began_s = time.monotonic()
    assert _flush(_save_of(first), grace_s=0.5) == []
    assert time.monotonic() - began_s >= 0.5


def test_a_decision_that_cannot_be_published_does_not_stop_the_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(flushing.os, "link", is_full)
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 2) as run:
        run.snapshot(0, 7)
        storage = LocalStorage(root, Files())
        _write(RankSave(run.regions[1], storage), 0, 7, attempt_token("5e55", 7))
        assert _flush(RankSave(run.regions[0], storage)) == [7]
        assert not list(run.folder.glob(".flush-*"))
    assert "cannot be published" in capfd.readouterr().err
    verify(root / "step-7")


def test_a_superseded_replica_writes_nothing(tmp_path: Path) -> None:
    """Not even what it could not commit."""
    claim = TokenClaim(token=1, lighthouse="a", quorum_id=1, members=("b:1",), last_takeover=0)
    tokens = FencingTokens(tmp_path, 0)
    for taken in (claim, replace(claim, token=2, last_takeover=2)):
        assert tokens.try_claim(taken)
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 1) as run:
        run.snapshot(0, 7)
        files = RecordingFiles(tmp_path)
        save = _save_of(run, files)
        save.fencing_tokens, save.writer_group = tokens, WriterGroup(fencing_token=1)
        assert _flush(save) == []
        assert _attempts(files) == []


def test_a_committed_part_is_not_written_again(tmp_path: Path) -> None:
    """Even by a writer that was not notified of the commit."""
    root = tmp_path / "checkpoint"
    with trainers(tmp_path, root, 2) as run:
        run.snapshot(0, 7)
        token = attempt_token("5e55", 7)
        saves = [RankSave(region, LocalStorage(root, Files())) for region in run.regions]
        for save in saves:
            _write(save, 0, 7, token)
        (path,) = root.glob("*/step-7/rank-00001.safetensors")
        before = path.stat().st_mtime_ns
        saves[1].write_missing(7, token, direct=False)
        saves[0].commit(7, token, saves[0].announcements(7, token))
        saves[1].write_missing(7, token, direct=False)
        assert os.listdir(root) == ["step-7"]
        assert (root / "step-7" / path.name).stat().st_mtime_ns == before
