"""What a writer does with its orders and attempts, in this process."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.snapshots import Trainers, snapshot, trainers, verify
from tests.unit.core.test_run_lease import put
from torchtitan_lite.checkpoint.background import writer as writing
from torchtitan_lite.checkpoint.background.channel import WriterChannel, WriterSettings
from torchtitan_lite.checkpoint.background.process import BackgroundProcess
from torchtitan_lite.checkpoint.background.save import RankSave, WriterGroup, attempt_token
from torchtitan_lite.checkpoint.background.writer import Writer
from torchtitan_lite.checkpoint.history.fencing_tokens import SupersededError
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.checkpoint.storage.safetensors_file import TokenBucket

_SESSION = "5e55"


class _Writer(Writer):
    """The writer of one rank of `run`, and the trainer's end of its pipes."""

    def __init__(self, run: Trainers, rank: int, **settings: Any) -> None:
        (orders, self._to_writer), (self._from_writer, responses) = os.pipe(), os.pipe()
        self._descriptors = [orders, self._to_writer, self._from_writer, responses]
        self.channel = WriterChannel(orders, responses)
        save = RankSave(run.regions[rank], open_storage(str(run.root)))
        super().__init__(save, WriterSettings(**settings), self.channel)

    def order(self, **order: Any) -> list[dict[str, Any]]:
        """Carry out an order, and return the responses."""
        self._carry_out(order)
        return self.responses()

    def commit(self) -> list[dict[str, Any]]:
        """Commit what is complete, and return the responses."""
        self._commit_complete()
        return self.responses()

    def responses(self) -> list[dict[str, Any]]:
        os.set_blocking(self._from_writer, False)
        try:
            lines = os.read(self._from_writer, 1 << 20).splitlines()
        except BlockingIOError:
            return []
        return [json.loads(line) for line in lines]

    def lose_trainer(self) -> None:
        """The trainer dies."""
        os.close(self._to_writer)
        self._descriptors.remove(self._to_writer)

    @property
    def rate(self) -> float | None:
        return self._rate.bytes_per_s

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


@contextmanager
def _writer(run: Trainers, rank: int = 0, **settings: Any) -> Iterator[_Writer]:
    made = _Writer(run, rank, **settings)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Trainers]:
    """Two ranks, whose slot 0 has step 7."""
    mesh = {"shape": [2], "axes": ["dp_shard"], "holders": ["rank-00000.safetensors"] * 2}
    layout = {"mesh": mesh, "placements": ["S(0)"], "shard_order": []}
    with trainers(tmp_path, tmp_path / "checkpoint", 2, layout=layout) as run:
        run.snapshot(0, 7)
        yield run


def _save(run: Trainers, rank: int) -> RankSave:
    return RankSave(run.regions[rank], open_storage(str(run.root)))


def _write(save: RankSave, token: str, step: int = 7, slot: int = 0) -> None:
    save.write(slot, step, token, direct=False, rate=TokenBucket(None))


def _names(responses: list[dict[str, Any]]) -> list[str]:
    return [next(iter(response)) for response in responses]


def test_an_order_without_a_token_is_the_first_attempt(run: Trainers) -> None:
    with _writer(run) as writer:
        (response,) = writer.order(save={"slot": 0, "step": 7})
    assert response["token"] == attempt_token(_SESSION, 7)


def test_only_the_leader_removes_an_attempt(run: Trainers) -> None:
    storage = open_storage(str(run.root))
    _write(_save(run, 0), "aa")
    with _writer(run, 1, preemption_grace_s=1.0) as writer:
        writer.channel.ended_at = time.monotonic() - 600
        writer.order(save={"slot": 0, "step": 7, "token": "aa"})
    assert list(attempts.announcements(storage, 7, "aa").parts) == [0]
    with _writer(run, 0, preemption_grace_s=1.0) as writer:
        writer.channel.ended_at = time.monotonic() - 600
        writer.order(save={"slot": 0, "step": 7, "token": "aa"})
    assert attempts.announcements(storage, 7, "aa").parts == {}


def test_a_step_that_another_attempt_completes_is_committed_once(
    run: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    with _writer(run) as writer:
        for token in ("aa", "bb"):
            assert _names(writer.order(save={"slot": 0, "step": 7, "token": token})) == ["written"]
        _write(_save(run, 1), "aa")
        # The second one would be over in time.
        monkeypatch.setattr(writing.time, "monotonic", lambda: now_s + 1e6)
        responses = writer.commit()
    assert _names(responses) == ["committed", "committed"]
    verify(Path(run.root) / "step-7")


def test_the_failure_of_another_rank_is_that_of_the_save(run: Trainers) -> None:
    with _writer(run) as writer:
        writer.order(save={"slot": 0, "step": 7, "token": "aa"})
        assert writer.commit() == []
        attempts.put_failure(open_storage(str(run.root)), 7, "aa", 1, "no space")
        (response,) = writer.commit()
    assert response["failed"] == 7 and "rank 1: no space" in response["error"]


def test_a_rank_that_does_not_write_in_time_fails_the_save(run: Trainers) -> None:
    with _writer(run, commit_timeout_s=0.0) as writer:
        responses = writer.order(save={"slot": 0, "step": 7, "token": "aa"})
    assert _names(responses) == ["written", "failed"]
    assert "ranks [1] did not write" in responses[1]["error"]


def test_the_death_of_the_trainer_lifts_the_limits_of_a_write(run: Trainers) -> None:
    with _writer(run, bytes_per_s=30_000.0) as writer:
        writer.lose_trainer()
        writer.order(save={"slot": 0, "step": 7})
        assert writer.rate is None


def test_a_joint_save_leaves_half_of_the_grace_period_for_a_flush(run: Trainers) -> None:
    run.regions[0].confirm(7)
    group = WriterGroup(index=0, count=2, token="ab")
    for given, result in ((WriterGroup(), "written"), (group, "abandoned")):
        with _writer(run, preemption_grace_s=1000.0) as writer:
            writer.channel.ended_at = time.monotonic() - 600
            save = {"slot": 0, "step": 7, "writer_group": given.to_json()}
            assert _names(writer.order(save=save)) == [result]


def test_an_announced_part_is_not_written_again(run: Trainers) -> None:
    """It may be committed. Also if the slot has another step by now."""
    save = _save(run, 1)
    _write(save, "aa")
    snapshot(run.regions[1], 0, 8)
    _write(save, "aa")


def test_a_part_that_an_earlier_process_wrote_is_not_missing(run: Trainers) -> None:
    save = _save(run, 1)
    _write(_save(run, 1), "aa")
    (path,) = Path(run.root).glob("*/step-7/rank-00001.safetensors")
    before = path.stat().st_mtime_ns
    save.write_missing(7, "aa", direct=False)
    assert path.stat().st_mtime_ns == before
    # A step that this rank does not have cannot be written.
    save.write_missing(9, "aa", direct=False)


def test_waiting_for_a_process_that_says_nothing_has_a_limit() -> None:
    process = BackgroundProcess(["sleep", "3"], {})
    process.start()
    assert process.wait_for("ready", 0.05) == []
    assert process.alive
    process.close(timeout_s=0.0)


def test_another_machine_with_a_lease_of_the_run_supersedes_it(tmp_path: Path) -> None:
    place = f"{tmp_path}/lease.json"
    WriterGroup().check(None, [place])
    put(str(tmp_path), machine="elsewhere")
    with pytest.raises(SupersededError):
        WriterGroup().check(None, [place])
