"""Outputs that wait until no machine has a lease of an earlier generation."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchtitan_lite.core.output_fence import (
    OUTPUTS_AFTER,
    allow_outputs,
    lease_clock_s,
    wait_for_outputs,
    withholds_outputs,
)
from torchtitan_lite.core.output_files import OutputFaults, RecordFile
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


@pytest.mark.parametrize("has_records", [False, True])
def test_a_file_with_records_is_closed_only_when_they_are_written(
    has_records: bool, withhold: Callable[[float], None], tmp_path: Path
) -> None:
    withhold(0.5)
    file = RecordFile(tmp_path / "records", OutputFaults())
    if has_records:
        file.append(b"one\n")
    began_s = time.monotonic()
    file.close()
    assert (time.monotonic() - began_s > 0.3) is has_records
    assert (tmp_path / "records").exists() is has_records


def test_time_accounting_waits(withhold: Callable[[float], None], tmp_path: Path) -> None:
    withhold(600)
    open_goodput_tracker(tmp_path, resumes=False).close()
    assert not (tmp_path / GOODPUT_FILE).exists()
    allow_outputs()
    open_goodput_tracker(tmp_path, resumes=False).close()
    assert (tmp_path / GOODPUT_FILE).exists()
