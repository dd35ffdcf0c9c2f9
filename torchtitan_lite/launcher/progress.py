"""How far a replica is, read from the files that it writes. Layer: imports nothing of the project.

Invariant: what an earlier attempt has written is not taken for progress of this one. The trainer
may replace `metrics.jsonl` at its start, by a copy without the steps that it will take again.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_HEALING = b"Receiving the state of another replica"
_HEALED = b"Training goes on at sample"


class _Tail:
    """What is appended to a file."""

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

    def _now(self) -> tuple[int | None, int]:
        """Which file lies there, and its size in bytes."""
        try:
            stat = self._path.stat()
        except OSError:
            return None, 0
        return stat.st_ino, stat.st_size


class Progress:
    """Of one attempt, from its start on."""

    def __init__(self, metrics: Path, leader_log: Path) -> None:
        """Begin with what is written from now on: `metrics` is the metrics.jsonl of the replica,
        `leader_log` what its rank 0 prints."""
        self._metrics, self._log = _Tail(metrics), _Tail(leader_log)
        self.is_healing = False
        """Whether the state of another replica is being received."""
        self.record: Mapping[str, Any] | None = None
        """The newest step that this attempt has taken."""

    def look(self) -> None:
        """Read what was written since."""
        for line in self._log.lines():
            if _HEALING in line:
                self.is_healing = True
            elif _HEALED in line:
                self.is_healing = False
        for line in self._metrics.lines():
            with suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict) and "loss" in values and "event" not in values:
                    self.record, self.is_healing = values, False
