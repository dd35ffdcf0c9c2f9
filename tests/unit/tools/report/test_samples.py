"""The check of sample ledgers, on ledgers written as by a run."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.cli import main
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.core.outputs import replica_folder, sample_ledger
from torchtitan_lite.tools.report import check_samples
from torchtitan_lite.training.metrics.sample_ledger import SampleLedger

_BATCH = 4
_OPEN: list[SampleLedger] = []
"""Ledgers to close at the end of a test."""


@pytest.fixture(autouse=True)
def closed_ledgers() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def _open(*args: Any, **kwargs: Any) -> SampleLedger:
    _OPEN.append(SampleLedger(*args, **kwargs))
    return _OPEN[-1]


class Replica:
    """Ledgers of the ranks of a replica, which share its samples."""

    def __init__(self, folder: Path, ranks: int, generation_id: str, step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.step, self.cursor, self.ranks = step, step * _BATCH, ranks
        self.ledgers = [
            _open(
                sample_ledger(folder, rank),
                OutputFaults(),
                continues=generation_id != "1",
                generation_id=generation_id,
                step=step,
                cursor=self.cursor,
                rank=rank,
                batch_rank=rank,
            )
            for rank in range(ranks)
        ]

    def begin(self, token: str = "", share: tuple[int, int] = (0, 1)) -> None:
        index, count = share
        size = _BATCH // count // self.ranks
        for rank, ledger in enumerate(self.ledgers):
            first = self.cursor + (index * self.ranks + rank) * size
            own = range(first, first + size)
            ledger.begin(
                self.step + 1, self.cursor, _BATCH, share=share, token=token, samples=list(own)
            )

    def end(self, outcome: str = "commit", ranks: Sequence[int] | None = None) -> None:
        if outcome == "commit":
            self.step += 1
        if outcome in ("commit", "skip"):
            self.cursor += _BATCH
        for rank in range(self.ranks) if ranks is None else ranks:
            self.ledgers[rank].end(outcome, self.step, self.cursor)

    def steps(self, count: int, token: str = "", share: tuple[int, int] = (0, 1)) -> None:
        for _ in range(count):
            self.begin(token, share)
            self.end()

    def place(self, step: int) -> None:
        self.step, self.cursor = step, step * _BATCH
        for ledger in self.ledgers:
            ledger.placed(step, self.cursor)


def test_committed_aborted_and_skipped_steps(tmp_path: Path) -> None:
    run = Replica(tmp_path, 2, "1")
    run.steps(2)
    run.begin()
    run.end("abort")
    run.steps(1)
    run.begin()
    run.end("skip")
    run.steps(1)
    checked = check_samples(tmp_path)
    assert checked.problems == []
    assert checked.samples == {step: list(range(start, start + 4))
                               for step, start in ((1, 0), (2, 4), (3, 8), (4, 16))}  # fmt: skip
    assert checked.num_skipped == 4
    assert "4 steps used 16 samples, each exactly once" in checked.summary()


@pytest.mark.parametrize("restored", [2, 3])
def test_an_undecided_step_is_decided_by_the_restored_state(tmp_path: Path, restored: int) -> None:
    run = Replica(tmp_path, 2, "1")
    run.steps(2)
    run.begin()
    Replica(tmp_path, 2, "2", step=restored).steps(2)
    checked = check_samples(tmp_path)
    assert checked.problems == []
    assert max(checked.samples) == restored + 2
    assert checked.num_recovered == restored - 2


def test_a_ledger_that_began_under_the_former_names_is_continued(tmp_path: Path) -> None:
    run = Replica(tmp_path, 1, "1")
    run.steps(2)
    run.begin()
    path = sample_ledger(tmp_path, 0)
    text = path.read_text()
    former = text.replace('"generation"', '"session"').replace('"generation_id"', '"session"')
    path.write_text(former)
    Replica(tmp_path, 1, "2", step=3).steps(1)
    assert former != text and path.read_text().startswith(former)
    checked = check_samples(tmp_path)
    assert checked.problems == [] and max(checked.samples) == 4
    assert checked.num_recovered == 1


def test_a_step_that_one_rank_recorded_is_committed(tmp_path: Path) -> None:
    run = Replica(tmp_path, 2, "1")
    run.begin()
    run.end(ranks=[1])
    Replica(tmp_path, 2, "2", step=1).steps(1)
    assert check_samples(tmp_path).problems == []


def test_a_restore_abandons_later_steps_also_on_fewer_ranks(tmp_path: Path) -> None:
    Replica(tmp_path, 4, "1").steps(5)
    second = Replica(tmp_path, 2, "2", step=2)
    second.steps(2)
    second.begin()
    Replica(tmp_path, 1, "3", step=5).steps(1)
    checked = check_samples(tmp_path)
    assert checked.problems == [] and max(checked.samples) == 6
    assert checked.num_recovered == 1


def test_a_rollback_drops_samples_on_purpose(tmp_path: Path) -> None:
    run = Replica(tmp_path, 1, "1")
    run.steps(4)
    run.begin()
    run.step, run.cursor = 2, 20
    run.ledgers[0].end("roll_back", 2, 20)
    run.steps(2)
    checked = check_samples(tmp_path)
    assert checked.problems == []
    assert checked.samples[3] == list(range(20, 24))
    assert checked.num_skipped == 12


def _two_replicas(folder: Path) -> tuple[Replica, Replica]:
    replicas = [Replica(replica_folder(folder, number), 1, "1") for number in (0, 1)]
    for number, one in enumerate(replicas):
        one.steps(3, "q1", (number, 2))
    return replicas[0], replicas[1]


def test_a_killed_replica_heals(tmp_path: Path) -> None:
    """Its last attempt was aborted by the other, which retries it alone."""
    first, second = _two_replicas(tmp_path)
    first.begin("q1", (0, 2))
    second.begin("q1", (1, 2))
    first.end("abort")
    first.steps(3, "q2")
    second = Replica(replica_folder(tmp_path, 1), 1, "2", step=3)
    second.place(6)
    for number, one in enumerate((first, second)):
        one.steps(2, "q3", (number, 2))
    checked = check_samples(tmp_path)
    assert checked.problems == [] and max(checked.samples) == 8
    assert checked.num_recovered == 0


def test_a_replica_killed_between_commit_and_outcome_has_taken_part(tmp_path: Path) -> None:
    first, second = _two_replicas(tmp_path)
    first.begin("q1", (0, 2))
    second.begin("q1", (1, 2))
    first.end()
    first.steps(1, "q2")
    checked = check_samples(tmp_path)
    assert checked.problems == [] and checked.samples[4] == list(range(12, 16))


def test_all_replicas_die_and_one_continues_from_an_older_state(tmp_path: Path) -> None:
    _two_replicas(tmp_path)
    Replica(replica_folder(tmp_path, 0), 1, "2", step=1).steps(4, "q2")
    checked = check_samples(tmp_path)
    assert checked.problems == [] and max(checked.samples) == 5


def _sender_that_dies(folder: Path, received: int) -> None:
    """A replica commits steps 4 and 5 alone; the other receives a state after `received`; then the
    first restarts from step 2."""
    first, second = _two_replicas(folder)
    first.steps(2, "q2")
    second.place(received)
    for number, one in enumerate((first, second)):
        one.place(received)
        one.steps(1, "q3", (number, 2))
    first = Replica(replica_folder(folder, 0), 1, "2", step=2)
    first.place(received + 1)
    for number, one in enumerate((first, second)):
        one.steps(1, "q4", (number, 2))


def test_steps_of_a_sender_that_died_are_part_of_the_received_state(tmp_path: Path) -> None:
    _sender_that_dies(tmp_path, received=5)
    checked = check_samples(tmp_path)
    assert checked.problems == [] and sorted(checked.samples) == list(range(1, 8))


def test_a_received_state_of_steps_that_nobody_committed_is_found(tmp_path: Path) -> None:
    _sender_that_dies(tmp_path, received=6)
    assert any("step 6 is not in the ledgers" in one for one in check_samples(tmp_path).problems)


def test_two_histories_are_found(tmp_path: Path) -> None:
    first, second = _two_replicas(tmp_path)
    first.steps(4, "q2")
    second.steps(3, "q3")
    assert any("in 2 histories" in one for one in check_samples(tmp_path).problems)


def _edit(path: Path, edit: Callable[[list[dict]], list[dict]]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in edit(lines)))


def _duplicate(lines: list[dict]) -> list[dict]:
    attempts = [line for line in lines if line["event"] == "samples"]
    attempts[2]["samples"] = attempts[1]["samples"]
    return lines


def _without_step(lines: list[dict]) -> list[dict]:
    start = next(
        k for k, line in enumerate(lines) if line["event"] == "samples" and line["step"] == 3
    )
    return [*lines[:start], *lines[start + 2 :]]


def _without_attempt(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["event"] != "samples" or line["step"] != 3]


def _lost_sample(lines: list[dict]) -> list[dict]:
    [line for line in lines if line["event"] == "samples"][1]["samples"].pop()
    return lines


def _repeated(lines: list[dict]) -> list[dict]:
    """A step that begins where the last one began."""
    return [*lines, {**lines[-2], "step": 5}, {**lines[-1], "step": 5}]


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (_duplicate, "lost"),
        (_without_step, "the rank was at sample"),
        (_without_attempt, "its line is lost"),
        (_lost_sample, "are lost"),
        (_repeated, "used twice"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_planted_duplicates_and_losses_are_found(
    tmp_path: Path,
    ranks: int,
    plant: Callable[[list[dict]], list[dict]],
    found: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Replica(tmp_path, ranks, "1").steps(4)
    assert main(["report", str(tmp_path), "--check-samples"]) == 0
    assert "OK: 4 steps used 16 samples" in capsys.readouterr().out
    _edit(sample_ledger(tmp_path, ranks - 1), plant)
    assert any(found in one for one in check_samples(tmp_path).problems)
    assert main(["report", str(tmp_path), "--check-samples"]) == 1
    assert "FAILED: " in capsys.readouterr().out


def test_a_lost_ledger_of_a_rank_is_found(tmp_path: Path) -> None:
    Replica(tmp_path, 2, "1").steps(3)
    sample_ledger(tmp_path, 1).unlink()
    assert any("are lost" in one for one in check_samples(tmp_path).problems)


def test_a_torn_last_line_is_not_a_record(tmp_path: Path) -> None:
    run = Replica(tmp_path, 1, "1")
    run.steps(2)
    path = sample_ledger(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-10])
    Replica(tmp_path, 1, "2", step=2).steps(1)
    checked = check_samples(tmp_path)
    assert checked.problems == [] and max(checked.samples) == 3


def test_a_folder_without_ledgers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="debug.sample_ledger"):
        check_samples(tmp_path)


def test_two_replicas_with_one_share_are_found(tmp_path: Path) -> None:
    for number, share in enumerate((0, 1, 1)):
        Replica(replica_folder(tmp_path, number), 1, "1").steps(2, "q1", (share, 2))
    assert any("used twice" in one for one in check_samples(tmp_path).problems)
