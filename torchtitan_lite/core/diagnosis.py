"""Diagnoses: which process is at fault, and what its fault is, in one fixed form.

Every detector reports through this module, so that a diagnosis is a line in the log that begins
with `Diagnosis:` and a record in a JSON Lines file. Ranks write `diagnoses_rank_N.jsonl` in the
folder of their replica, the launcher `diagnoses.jsonl` beside its logs: one writer per file, so
that none needs a lock. docs/fault_tolerance.md has the vocabulary.
"""

import json
import logging
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from threading import RLock

from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_files import OutputFaults, RecordFile

RANK, WRITER = "rank", "checkpoint writer"
LIGHTHOUSE, NOTIFIER = "lighthouse", "departure notifier"
"""Kinds of processes."""


class Cause(Enum):
    """Cause of a fault. The values are displayed and recorded."""

    STOPPED = "stopped"
    """The process is stopped, by a signal or a debugger."""
    HANG = "hang"
    """The rank stays in its own code while others wait for it."""
    PROCESS_DIED = "process_died"
    """The process was killed, or ended with an error that has no other cause here."""
    COLLECTIVE_MISMATCH = "collective_mismatch"
    """The rank calls other collectives than the other ranks of a group."""
    SHAPE_MISMATCH = "shape_mismatch"
    """The rank calls the same collective with another shape or dtype."""
    SLOW_RANK = "slow_rank"
    """The rank's own work takes longer than that of the others."""
    SLOW_DATA = "slow_data"
    """The rank waits for its microbatches longer than the others."""
    SLOW_STORAGE = "slow_storage"
    """The rank's checkpoint writer writes slower than the others, in all and per byte."""
    SLOW_LINK = "slow_link"
    """Data waits on the rank's connections to others."""
    DEAD_LINK = "dead_link"
    """The rank's connections to others acknowledge nothing."""
    MEMORY_CORRUPTION = "memory_corruption"
    """Weights or optimizer state of the rank changed although nothing wrote them."""
    WRONG_COMPUTATION = "wrong_computation"
    """The rank computes an anomalous step differently a second time."""
    NON_FINITE = "non_finite"
    """The rank's own loss is not finite, that of most ranks is: its data or weights."""
    STORAGE_FULL = "storage_full"
    """The process cannot write: no space, a quota, or a limit of file sizes."""
    OUT_OF_MEMORY = "out_of_memory"
    """The process has no memory left, or soon none."""
    OUT_OF_DESCRIPTORS = "out_of_descriptors"
    """The process cannot open files and connections any more, or soon not."""
    CLOCK_JUMP = "clock_jump"
    """The wall clock of the process jumped."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A fault, and the process that has it."""

    cause: Cause
    text: str
    """Observation, for display."""
    rank: int | None = None
    """Rank in its replica; None for a process that belongs to none."""
    replica: int | None = None
    """None outside of a replica, or in a run without fault tolerance."""
    process: str = RANK
    """Kind of the process."""
    peers: tuple[tuple[int, int], ...] = ()
    """Ranks at the other ends of its faulty links, each with its replica before it."""

    def __str__(self) -> str:
        numbers = (("replica", self.replica), ("rank", self.rank))
        where = [f"{name} {number}" for name, number in numbers if number is not None]
        process = [] if self.process == RANK else [self.process]
        return f"Diagnosis: {', '.join([self.cause.value, *where, *process])}: {self.text}"

    def to_json(self) -> bytes:
        """Return one line, with its end. `time` is Unix time, in seconds."""
        values = {"time": time.time(), **asdict(self), "cause": self.cause.value}
        return json.dumps(values).encode() + b"\n"


def report_diagnosis(diagnosis: Diagnosis, level: int = logging.WARNING) -> None:
    """Log a diagnosis, and record it in the file of this process, if it has one, also where the
    level of the log hides it."""
    logger.log(level, "%s", diagnosis)
    for handler in logger.handlers:
        if isinstance(handler, _FileHandler):
            handler.record(diagnosis)


def cause_in(text: str) -> Cause | None:
    """Return the cause that an error message names; None if it names none of these. The operating
    system uses the same words in every program."""
    return next((cause for cause, pattern in _ERRORS if re.search(pattern, text)), None)


def report_text(text: str, *, rank: int, process: str = RANK, level: int = logging.WARNING) -> None:
    """Log `text`, as a diagnosis if it names a cause."""
    cause = cause_in(text)
    if cause is None:
        logger.log(level, "%s", text)
    else:
        report_diagnosis(Diagnosis(cause=cause, text=text, rank=rank, process=process), level)


@contextmanager
def recording_diagnoses(
    folder: Path, rank: int, replica: int | None, faults: OutputFaults
) -> Iterator[None]:
    """Record the diagnoses of this rank in `folder` during the block. Those that name no replica
    get that of this rank."""
    handler = _FileHandler(RecordFile(rank_file(folder, rank), faults), replica)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's diagnoses, in the folder of its replica."""
    return folder / f"diagnoses_rank_{rank}.jsonl"


LAUNCHER_FILE = "diagnoses.jsonl"
"""File of the launcher's diagnoses, in the folder of its logs."""
_ERRORS = (
    (Cause.OUT_OF_MEMORY, r"MemoryError|OutOfMemory|allocate memory|bad_alloc|out of memory"),
    (Cause.OUT_OF_DESCRIPTORS, r"Too many open files"),
    (Cause.STORAGE_FULL, r"No space left on device|Disk quota exceeded|File too large"),
)


class _FileHandler(logging.NullHandler):
    """Writes diagnoses, and no other messages. The file stays open, because a process without free
    descriptors must be able to say so."""

    def __init__(self, file: RecordFile, replica: int | None) -> None:
        super().__init__()
        self._file, self._replica = file, replica
        self._lock = RLock()
        self._records: deque[bytes] = deque()
        self._is_writing = False

    def record(self, diagnosis: Diagnosis) -> None:
        """Write a diagnosis. Any thread may call it, also while it writes another one: a full disk
        is itself a diagnosis."""
        if diagnosis.replica is None:
            diagnosis = replace(diagnosis, replica=self._replica)
        with self._lock:
            self._records.append(diagnosis.to_json())
            if self._is_writing:
                return
            self._is_writing = True
            try:
                while self._records:
                    self._file.append(self._records.popleft())
            finally:
                self._is_writing = False

    def close(self) -> None:
        self._file.close()
        super().close()
