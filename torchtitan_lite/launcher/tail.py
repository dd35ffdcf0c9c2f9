"""Follows a file that grows. Layer: imports nothing of the project."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


class Tail:
    """What is appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._place = self._now()
        self._partial = b""

    def lines(self) -> list[bytes]:
        """Those that have become whole since."""
        file, size = self._now()
        if file != self._file and self._file is not None:
            # The file was replaced: what it holds already is old.
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
        """Of a file of JSON lines: the objects in them."""
        return records(self.lines())

    def _now(self) -> tuple[int | None, int]:
        """Which file lies there, and its size in bytes."""
        try:
            stat = self._path.stat()
        except OSError:
            return None, 0
        return stat.st_ino, stat.st_size


def records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among `lines`."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def is_step(record: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl tells of a step, and not of something else."""
    return "event" not in record and "loss" in record
