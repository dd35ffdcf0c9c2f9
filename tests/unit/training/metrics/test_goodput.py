"""Every nanosecond is accounted for once, whatever happens to its step."""

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.ranks import exit_status
from torchtitan_lite.core.phases import Phase
from torchtitan_lite.training.metrics import goodput
from torchtitan_lite.training.metrics.goodput import (
    KINDS,
    GoodputTracker,
    TimeByStep,
    open_goodput_tracker,
    process_age_s,
)

S = 10**9


class Run:
    """A manual clock, and the time accounting of consecutive attempts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "goodput.json"
        self.now_ns = 1000 * S
        self.compiled_ns = 0

    def start(self, *, after_s: float = 0, resumes: bool = True) -> GoodputTracker:
        self.now_ns += round(after_s * S)
        return GoodputTracker(
            self.path,
            started_ns=self.now_ns,
            resumes=resumes,
            clock=lambda: self.now_ns,
            compiled_ns=lambda: self.compiled_ns,
        )

    def spend(
        self, goodput_tracker: GoodputTracker, phase: Phase, step: int, seconds: float
    ) -> None:
        """Enter a phase and stay in it for this time."""
        goodput_tracker.entered(phase, step)
        self.now_ns += round(seconds * S)

    def take(
        self,
        goodput_tracker: GoodputTracker,
        step: int,
        *,
        commits: bool = True,
        seconds: float = 1,
    ) -> None:
        """Attempt the step after `step`: `seconds` of work, and 0.25 s of other phases."""
        # As `train_step` does: the other phases are blocks within COMPUTE.
        self.spend(goodput_tracker, Phase.COMPUTE, step, 0)
        self.spend(goodput_tracker, Phase.QUORUM, step, 0.125)
        self.spend(goodput_tracker, Phase.COMPUTE, step, 0)
        self.spend(goodput_tracker, Phase.DATA, step, seconds / 4)
        self.spend(goodput_tracker, Phase.COMPUTE, step, seconds / 2)
        self.spend(goodput_tracker, Phase.COMMUNICATION, step, seconds / 4)
        self.spend(goodput_tracker, Phase.COMPUTE, step + commits, 0)
        self.spend(goodput_tracker, Phase.BETWEEN, step + commits, 0)
        self.spend(goodput_tracker, Phase.CHECKPOINT, step + commits, 0.0625)
        self.spend(goodput_tracker, Phase.BETWEEN, step + commits, 0.0625)


def seconds(goodput_tracker: GoodputTracker) -> dict[str, float]:
    return {kind: ns / S for kind, ns in goodput_tracker.totals().ns.items() if ns}


def test_time_is_added_to_the_current_phase(tmp_path: Path) -> None:
    run = Run(tmp_path)
    goodput_tracker = run.start()
    run.spend(goodput_tracker, Phase.START, 0, 3)
    run.take(goodput_tracker, 0)
    run.spend(goodput_tracker, Phase.QUORUM, 1, 0.125)
    run.spend(goodput_tracker, Phase.COMPUTE, 1, 1.25)
    run.compiled_ns = S // 4
    run.spend(goodput_tracker, Phase.CHECKPOINT, 2, 0.125)
    run.spend(goodput_tracker, Phase.BETWEEN, 2, 0.25)
    assert seconds(goodput_tracker) == {
        "start": 3,
        "quorum": 0.25,
        "data": 0.25,
        "compile": 0.25,
        "compute": 1.5,
        "communication": 0.25,
        "checkpoint": 0.1875,
        "between": 0.3125,
    }
    assert goodput_tracker.totals().wall_s == 6
    assert goodput_tracker.totals().goodput == goodput_tracker.goodput() == 1.75 / 6


def test_a_device_that_works_while_the_host_waits_is_counted_by_its_work(tmp_path: Path) -> None:
    """The host issues forward and backward in 0.125 s, and waits 2 s in the reduction, in which
    the device computes until 0.5 s before its end."""
    run = Run(tmp_path)
    goodput_tracker = run.start()
    run.spend(goodput_tracker, Phase.QUORUM, 0, 0)
    run.spend(goodput_tracker, Phase.COMPUTE, 0, 0.125)
    run.spend(goodput_tracker, Phase.COMMUNICATION, 0, 1)
    # Reading the goodput in between changes nothing.
    goodput_tracker.goodput()
    run.now_ns += S
    goodput_tracker.device_worked(Phase.COMPUTE, 0.5)
    run.now_ns += S // 4
    run.spend(goodput_tracker, Phase.CHECKPOINT, 1, 0)
    assert seconds(goodput_tracker) == {"compute": 1.625, "communication": 0.75}
    # Work that ended before the phase began moves nothing.
    run.spend(goodput_tracker, Phase.COMMUNICATION, 1, 1)
    goodput_tracker.device_worked(Phase.COMPUTE, 3)
    run.spend(goodput_tracker, Phase.CHECKPOINT, 2, 0)
    assert seconds(goodput_tracker) == {"compute": 1.625, "communication": 1.75}
    assert goodput_tracker.totals().wall_s == 3.375


def test_a_step_that_is_not_committed_is_lost_work(tmp_path: Path) -> None:
    run = Run(tmp_path)
    goodput_tracker = run.start()
    run.take(goodput_tracker, 0)
    run.take(goodput_tracker, 1, commits=False)
    run.take(goodput_tracker, 1)
    actual = seconds(goodput_tracker)
    assert actual["lost"] == 1
    assert actual["compute"] == 1
    assert actual["quorum"] == 0.375


def test_steps_repeated_after_a_restart_are_lost_work(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.start()
    for step in range(5):
        run.take(first, step)
    # Killed in the sixth step.
    run.spend(first, Phase.QUORUM, 5, 2)
    first.entered(Phase.COMPUTE, 5)
    before = json.loads(run.path.read_text())
    assert before["wall_s"] == 8.25

    second = run.start(after_s=7)
    run.spend(second, Phase.START, 0, 3)
    run.spend(second, Phase.QUORUM, 3, 1)
    assert "lost" not in seconds(second)
    run.take(second, 3)
    actual = seconds(second)
    assert actual["lost"] == 2
    assert actual["idle"] == 7
    assert actual["compute"] == 0.5 * 4
    assert second.totals().wall_s == 8.25 + 7 + 3 + 1 + 1.25


def test_steps_that_others_committed_meanwhile_are_not_lost(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.start()
    for step in range(5):
        run.take(first, step)
    first.close()
    second = run.start(after_s=1)
    # It restores step 3, and receives the state of an up-to-date replica.
    run.spend(second, Phase.QUORUM, 3, 1)
    run.spend(second, Phase.HEALING, 3, 0.5)
    run.spend(second, Phase.QUORUM, 3, 0.5)
    run.spend(second, Phase.DATA, 9, 0.25)
    run.spend(second, Phase.CHECKPOINT, 10, 0)
    actual = seconds(second)
    assert "lost" not in actual
    assert actual["healing"] == 0.5
    assert actual["data"] == 1.5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"version": 1, "first_start_ns": 0, "until_ns": 5, "entries": [[1, 1, {"idle": 4}]]}',
        b'{"version": 1, "first_start_ns": 0, "until_ns": 4, "entries": [[1, 1, {"joy": 4}]]}',
        b'{"version": 1, "first_start_ns": 0, "until_ns": -4, "entries": [[1, 1, {"idle": -4}]]}',
        b'{"version": 1, "first_start_ns": 0, "until_ns": 4, "entries": [[2, 1, {"idle": 4}]]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_damaged_file_is_reported_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.path.write_bytes(content)
    goodput_tracker = run.start()
    assert "is damaged, and time accounting starts again" in caplog.text
    run.take(goodput_tracker, 0)
    assert goodput_tracker.totals().wall_s == 1.25


def test_a_run_that_starts_from_scratch_has_a_new_accounting(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.take(run.start(), 0)
    run.now_ns += 100 * S
    goodput_tracker = run.start(resumes=False)
    run.take(goodput_tracker, 0)
    assert goodput_tracker.totals().wall_s == 1.25


def test_a_clock_that_is_set_back_counts_no_time_twice(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.start()
    run.take(first, 0)
    first.close()
    run.now_ns -= 500 * S
    second = run.start()
    run.take(second, 1)
    second.close()
    assert second.totals().wall_s == 2.5
    accounting = json.loads(run.path.read_text())
    assert accounting["until_ns"] - accounting["first_start_ns"] == 2.5 * S


@pytest.mark.parametrize("jump_s", [86_400, -86_400])
@pytest.mark.parametrize("is_same_boot", [True, False])
def test_a_clock_that_is_set_between_two_processes_adds_no_time(
    jump_s: int, is_same_boot: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_goodput_tracker(tmp_path, resumes=False).close()
    time_ns = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: time_ns() + jump_s * 10**9)
        if not is_same_boot:
            patch.setattr(goodput, "_BOOT_ID", "/proc/version")
        tracker = open_goodput_tracker(tmp_path, resumes=True)
        wall_s = tracker.totals().wall_s
    if is_same_boot or jump_s < 0:
        assert wall_s < 3600
    else:
        # The machine may have been off for so long.
        assert wall_s > jump_s


def test_an_unwritable_folder_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").write_text("a file")
    run = Run(tmp_path / "folder")
    goodput_tracker = run.start(resumes=False)
    for step in range(5):
        run.take(goodput_tracker, step)
    goodput_tracker.close()
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize("seed", range(2))
def test_all_kinds_add_up_to_the_wall_time(seed: int, tmp_path: Path) -> None:
    random_ = random.Random(seed)
    run = Run(tmp_path)
    first_ns, step = run.now_ns, 0
    for attempt in range(8):
        goodput_tracker = run.start(after_s=random_.random() * 10 if attempt else 0)
        run.spend(goodput_tracker, Phase.START, 0, random_.random())
        step = max(0, step - random_.choice([0, 1, 40, 200]))
        for _ in range(random_.randrange(60)):
            run.compiled_ns += random_.randrange(S // 10)
            commits = random_.random() < 0.9
            run.take(goodput_tracker, step, commits=commits, seconds=random_.random())
            step += commits
            if random_.random() < 0.05:
                step = max(0, step - random_.randrange(20))
            assert sum(goodput_tracker.totals().ns.values()) == run.now_ns - first_ns
            assert goodput_tracker.goodput() == goodput_tracker.totals().goodput
        if random_.random() < 0.5:
            goodput_tracker.close()
        accounting = json.loads(run.path.read_text())
        # Time that a killed process did not record is idle time of the next one.
        assert accounting["until_ns"] <= run.now_ns
        total = sum(sum(ns.values()) for _, _, ns in accounting["entries"])
        assert total == accounting["until_ns"] - accounting["first_start_ns"]
        assert set(goodput_tracker.totals().ns) == set(KINDS)
        assert len(accounting["entries"]) < 150


def test_a_resumed_run_continues_the_file_of_the_former_name(tmp_path: Path) -> None:
    former, path = tmp_path / "books.json", tmp_path / "goodput.json"
    open_goodput_tracker(tmp_path, resumes=False).close()
    path.rename(former)
    first_ns = json.loads(former.read_text())["first_start_ns"]
    open_goodput_tracker(tmp_path, resumes=True).close()
    assert json.loads(path.read_text())["first_start_ns"] == first_ns
    assert not former.exists()


def test_old_steps_share_an_entry_and_lose_their_part_of_it() -> None:
    times = TimeByStep()
    for step in range(1, 1001):
        times.add(step, {"compute": 10, "quorum": 1})
    entries = times.to_json()
    assert len(entries) <= 130
    assert entries[-5:] == [[n, n, {"compute": 10, "quorum": 1}] for n in range(996, 1001)]
    times.lose_after(100)
    assert times.totals == Counter({"compute": 1000, "quorum": 1000, "lost": 9000})
    assert times.highest == 100
    assert TimeByStep.from_json(times.to_json()).totals == times.totals


def sleep_and_check_age(started: float) -> None:
    # The process that this one was forked from is older.
    time.sleep(0.5)
    assert 0.5 < process_age_s() < time.monotonic() - started + 0.1


def test_a_process_knows_its_age() -> None:
    started = time.monotonic()
    assert exit_status(sleep_and_check_age, started) == 0
    assert process_age_s() > time.monotonic() - started


def test_a_quorum_during_an_attempt_makes_no_work_lost(tmp_path: Path) -> None:
    run = Run(tmp_path)
    goodput_tracker = run.start()
    run.spend(goodput_tracker, Phase.QUORUM, 0, 1)
    run.spend(goodput_tracker, Phase.COMPUTE, 0, 2)
    # Semi-synchronous replicas form a quorum after the step is committed.
    run.spend(goodput_tracker, Phase.QUORUM, 1, 1)
    run.spend(goodput_tracker, Phase.COMMUNICATION, 1, 0.5)
    run.spend(goodput_tracker, Phase.CHECKPOINT, 1, 0)
    assert seconds(goodput_tracker) == {"quorum": 2, "compute": 2, "communication": 0.5}
