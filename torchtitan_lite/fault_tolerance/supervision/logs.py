"""Readers of what a replica writes: its logs and its metrics.jsonl."""

import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_lite.core.durations import recent_steps, time_left_s
from torchtitan_lite.core.outputs import PARTICIPATES, RECEIVES_STATE, STARTING

_TORCHFT_INFO = "[INFO] [torchft::"
"""Text in the lines that torchft's Rust code logs at level INFO."""
_TAIL_BYTES = 1 << 16
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_LONGEST_STAGE = 40


class ReplicaProgress:
    """Progress of one generation of a replica, from its logs and metrics.

    Invariant: records of an earlier generation do not count. At its start the trainer may replace
    `metrics.jsonl` by a copy without the steps that it will repeat.
    """

    def __init__(self, metrics: Path, leader_log: Path) -> None:
        """Read what is written from now on: `metrics` is the metrics.jsonl of the replica,
        `leader_log` the log of its rank 0."""
        self._metrics, self._log = Tail(metrics), Tail(leader_log)
        self.is_healing = False
        """Whether the replica is receiving state from another one."""
        self.stage = "importing torch"
        """Stage of the leader before its first step."""
        self.last_step: Mapping[str, Any] | None = None
        """Newest record of a step of this generation."""
        self.total_steps: int | None = None
        """Number of the last step, once known."""
        self._recent_step_s = recent_steps()

    @property
    def time_left_s(self) -> float | None:
        """Estimated seconds until the last step has ended."""
        step = None if self.last_step is None else self.last_step.get("step")
        if self.total_steps is None or not isinstance(step, int):
            return None
        return time_left_s(self._recent_step_s, max(0, self.total_steps - step))

    def update(self) -> None:
        """Read what was written since the last call."""
        for line in self._log.lines():
            if RECEIVES_STATE.encode() in line:
                self.is_healing = True
            elif PARTICIPATES.encode() in line:
                self.is_healing = False
            elif (place := line.find(STARTING.encode())) >= 0:
                stage = line[place + len(STARTING) :].decode(errors="replace").strip()
                self.stage = "".join(filter(str.isprintable, stage))[:_LONGEST_STAGE]
        for record in self._metrics.records():
            if is_step(record):
                self.last_step, self.is_healing = record, False
                taken_s = record.get("step_time_s")
                if isinstance(taken_s, float) and math.isfinite(taken_s):
                    self._recent_step_s.append(taken_s)
            elif record.get("event") == "start" and isinstance(record.get("steps"), int):
                self.total_steps = record["steps"]


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to it, without a buffer. If its disk is full or gone, its content is
    discarded, because a run must not end for lack of a log."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError:
        return open(os.devnull, "ab", buffering=0)


def make_log_folder(folder: Path) -> Path:
    """Create the folder of a generation's logs, and return it; if its disk is full or gone, return
    a temporary one."""
    try:
        folder.mkdir(parents=True)
        return folder
    except FileExistsError:
        raise
    except OSError:
        return Path(tempfile.mkdtemp(prefix="torchtitan_lite_logs_"))


class Tail:
    """Reader of the lines appended to a file after its creation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._place = self._now()
        self._partial = b""

    def lines(self) -> list[bytes]:
        """Return the lines completed since the last call."""
        file, size = self._now()
        if file != self._file and self._file is not None:
            # The file was replaced: skip its contents, which are old.
            self._place, self._partial = size, b""
        self._file = file
        if size <= self._place:
            return []
        with suppress(OSError), self._path.open("rb") as opened:
            opened.seek(self._place)
            content = opened.read()
            self._place += len(content)
            *lines, self._partial = (self._partial + content).split(b"\n")
            return lines
        return []

    def records(self) -> Iterator[dict[str, Any]]:
        """Return the JSON objects among the new lines of a JSON Lines file."""
        return records(self.lines())

    def _now(self) -> tuple[int | None, int]:
        """Return the inode of the file and its size in bytes."""
        try:
            stat = self._path.stat()
        except OSError:
            return None, 0
        return stat.st_ino, stat.st_size


def records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among `lines`."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                yield record


def is_step(record: dict[str, Any]) -> bool:
    """Return whether a record of metrics.jsonl is a step rather than an event."""
    return "event" not in record and "loss" in record


class TorchftLogFilter:
    """Splitter of a stream into lines that drops torchft's INFO lines."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, content: bytes) -> list[bytes]:
        """Return the lines that `content` completes, without line endings."""
        *lines, self._partial = (self._partial + content).split(b"\n")
        return [line for line in lines if not is_torchft_info(line)]


def last_lines(path: Path, count: int) -> list[str]:
    """Return at most `count` lines from the end of a log, without blank lines and torchft's INFO
    lines."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read()
    except OSError:
        return []
    lines = [line for line in content.split(b"\n") if line.strip() and not is_torchft_info(line)]
    return [line.decode(errors="replace").rstrip() for line in lines[-count:]]


def is_torchft_info(line: bytes) -> bool:
    """Return whether torchft's Rust code logged `line` at level INFO: it logs eight such lines per
    step."""
    return _TORCHFT_INFO.encode() in line


def mask_numbers(line: str) -> str:
    """Replace the numbers in `line`, so that lines that differ only in times, ports and addresses
    are equal."""
    return _NUMBERS.sub("#", line)
