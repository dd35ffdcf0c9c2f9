"""Diagnoses have one form, in the log and in the file of their process."""

import errno
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from torchtitan_lite.core.diagnosis import (
    WRITER,
    Cause,
    Diagnosis,
    rank_file,
    recording_diagnoses,
    report_diagnosis,
    report_text,
)
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_files import OutputFaults, RecordFile


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the logger."""
    found: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    monkeypatch.setattr(logger, "handlers", [Collecting()])
    return found


def test_a_diagnosis_is_logged_and_recorded(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with recording_diagnoses(tmp_path, 3, 1, OutputFaults()):
        report_diagnosis(Diagnosis(cause=Cause.CLOCK_JUMP, text="by +60.0 s", rank=3))
        report_diagnosis(Diagnosis(cause=Cause.PROCESS_DIED, text="killed", rank=2, process=WRITER))
        logger.warning("no diagnosis")
        monkeypatch.setattr(logger, "isEnabledFor", lambda level: level >= logging.ERROR)
        report_diagnosis(Diagnosis(cause=Cause.HANG, text="hidden", rank=3), logging.INFO)
    report_diagnosis(Diagnosis(cause=Cause.HANG, text="after the end", rank=3), logging.INFO)
    assert messages[:2] == [
        "Diagnosis: clock_jump, rank 3: by +60.0 s",
        "Diagnosis: process_died, rank 2, checkpoint writer: killed",
    ]
    first, second, hidden = map(json.loads, rank_file(tmp_path, 3).read_text().splitlines())
    assert hidden["text"] == "hidden" and len(messages) == 3
    assert (first["cause"], first["replica"], first["rank"]) == ("clock_jump", 1, 3)
    assert (second["process"], second["rank"], second["replica"]) == ("checkpoint writer", 2, 1)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", Cause.STORAGE_FULL),
        ("OSError: [Errno 24] Too many open files: '/x'", Cause.OUT_OF_DESCRIPTORS),
        ("DefaultCPUAllocator: can't allocate memory: you tried", Cause.OUT_OF_MEMORY),
        ("FileNotFoundError: x", None),
    ],
)
def test_the_words_of_the_operating_system_name_the_cause(
    text: str, cause: Cause | None, tmp_path: Path, messages: list[str]
) -> None:
    with recording_diagnoses(tmp_path, 0, None, OutputFaults()):
        report_text(text, rank=0)
    recorded = [
        json.loads(line)["cause"] for line in rank_file(tmp_path, 0).read_text().splitlines()
    ]
    assert recorded == ([] if cause is None else [cause.value])
    assert text in messages[0]


def test_a_full_disk_is_diagnosed_once_and_loses_no_diagnosis(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = OutputFaults(partial(report_text, rank=0))
    write, num_writes = RecordFile._write, 0

    def fails_at_first(file: RecordFile, record: bytes) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes <= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, record)

    monkeypatch.setattr(RecordFile, "_write", fails_at_first)
    with recording_diagnoses(tmp_path, 0, None, faults):
        RecordFile(tmp_path / "metrics.jsonl", faults).append(b"{}\n")
        for number in range(9):
            report_diagnosis(Diagnosis(cause=Cause.HANG, text=str(number), rank=0))
    causes = [json.loads(line)["cause"] for line in rank_file(tmp_path, 0).read_text().splitlines()]
    assert causes == ["storage_full", *["hang"] * 9]
    assert sum("No space left" in message for message in messages) == 1


def test_threads_write_whole_diagnoses_in_one_file(tmp_path: Path, messages: list[str]) -> None:
    with recording_diagnoses(tmp_path, 0, None, OutputFaults()), ThreadPoolExecutor(4) as threads:
        diagnoses = [Diagnosis(cause=Cause.HANG, text=f"{n}", rank=0) for n in range(200)]
        list(threads.map(report_diagnosis, diagnoses))
    texts = [json.loads(line)["text"] for line in rank_file(tmp_path, 0).read_text().splitlines()]
    assert sorted(map(int, texts)) == list(range(200))
