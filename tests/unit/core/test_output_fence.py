"""Outputs that wait until no machine has a lease of an earlier generation."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchtitan_lite.core.output_fence import (
    OUTPUTS_AFTER,
    abort_waits,
    allow_outputs,
    begin_generation,
    lease_clock_s,
    wait_for_outputs,
    withholds_outputs,
)
from torchtitan_lite.core.output_files import OutputFaults, RecordFile, flush_withheld
from torchtitan_lite.core.preemption import TrainingAborted
from torchtitan_lite.training.metrics.goodput import GOODPUT_FILE, open_goodput_tracker
from torchtitan_lite.training.metrics.jsonl import JsonLines
from torchtitan_lite.training.metrics.record import Event


@pytest.fixture
def withhold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Withholds the outputs of this process for some seconds."""
    yield lambda seconds: monkeypatch.setenv(OUTPUTS_AFTER, str(lease_clock_s() + seconds))


def test_outputs_are_withheld_for_a_time_or_until_they_are_allowed(
    withhold: Callable[[float], None],
) -> None:
    assert not withholds_outputs()
    withhold(0.3)
    assert withholds_outputs()
    began_s = time.monotonic()
    wait_for_outputs()
    assert time.monotonic() - began_s >= 0.25 and not withholds_outputs()
    withhold(600)
    threading.Timer(0.2, allow_outputs).start()
    wait_for_outputs()
    assert not withholds_outputs()


def test_records_wait_and_the_file_is_as_it_was(
    withhold: Callable[[float], None], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    with_another = [{"event": "e", "step": step, "time": 0.0} for step in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in with_another))
    before = path.read_bytes()
    withhold(600)
    lines = JsonLines(path, resume_step=2)
    lines.event(Event(name="resume", step=2, values={}))
    assert path.read_bytes() == before
    # The machine that is probably lost may still write.
    with path.open("a") as other:
        other.write(json.dumps({"event": "late", "step": 4, "time": 0.0}) + "\n")
    allow_outputs()
    lines.event(Event(name="saved", step=3, values={}))
    lines.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in written] == [
        ("e", 0), ("e", 1), ("e", 2), ("resume", 2), ("saved", 3)
    ]  # fmt: skip


def test_an_aborted_training_leaves_its_records_to_the_next_one(
    withhold: Callable[[float], None], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [{"step": step, "event": "first", "time": 0.0} for step in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in steps))
    withhold(600)
    lines = JsonLines(path, resume_step=2)
    for step in (3, 4, 5):
        lines.event(Event(name="second", step=step, values={}))
    lines.close()
    # It resumes from the snapshot of a step that the aborted one has taken.
    lines = JsonLines(path, resume_step=4)
    lines.event(Event(name="third", step=5, values={}))
    allow_outputs()
    lines.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in written] == [
        ("first", 0), ("first", 1), ("first", 2), ("second", 3), ("second", 4), ("third", 5)
    ]  # fmt: skip


def test_records_are_written_when_outputs_are_allowed(
    withhold: Callable[[float], None], tmp_path: Path
) -> None:
    withhold(600)
    file = RecordFile(tmp_path / "records", OutputFaults())
    file.append(b"one\n")
    flush_withheld()
    assert not (tmp_path / "records").exists()
    allow_outputs()
    flush_withheld()
    assert (tmp_path / "records").read_bytes() == b"one\n"
    file.close()


def test_an_abort_ends_the_wait(withhold: Callable[[float], None]) -> None:
    withhold(600)
    threading.Timer(0.2, abort_waits).start()
    with pytest.raises(TrainingAborted):
        wait_for_outputs()
    # The next generation waits again.
    begin_generation(str(lease_clock_s() + 0.2))
    wait_for_outputs()


def test_time_accounting_waits(withhold: Callable[[float], None], tmp_path: Path) -> None:
    withhold(600)
    open_goodput_tracker(tmp_path, resumes=False).close()
    assert not (tmp_path / GOODPUT_FILE).exists()
    allow_outputs()
    open_goodput_tracker(tmp_path, resumes=False).close()
    assert (tmp_path / GOODPUT_FILE).exists()
