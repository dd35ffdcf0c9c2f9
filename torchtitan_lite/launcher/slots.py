"""The file that says for how many ranks each replica has place. Layer: imports nothing of the
project.

Whoever knows of the machines writes it: JSON such as {"0": 2, "1": 1}, by the number of the
replica; who is not named has place for all. Invariant: a file that is being written, is gone or
makes no sense changes nothing.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

_MOST_BYTES = 1 << 16
_READING_S = 0.25


class SlotsFile:
    """What the file has said last."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        """None: there is no such file. `say` tells people when it cannot be understood."""
        self._path, self._say = path, say
        self._slots: Mapping[int, int] = {}
        self._content: bytes | None = b""
        self._read_at_s = float("-inf")

    def look(self, now_s: float) -> Mapping[int, int]:
        """By replica: for how many ranks it has place."""
        if self._path is not None and now_s >= self._read_at_s:
            self._read_at_s = now_s + _READING_S
            self._read(self._path)
        return self._slots

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                content = file.read(_MOST_BYTES)
        except OSError:
            content = None
        if content == self._content:
            return
        self._content = content
        found = None if content is None else parse_slots(content)
        if found is not None:
            self._slots = found
        else:
            self._say(f'{path} is not as {{"0": 2, "1": 1}}: what was known before holds')


def parse_slots(content: bytes) -> Mapping[int, int] | None:
    """By replica: for how many ranks it has place; None where that is not what it says."""
    try:
        told = json.loads(content)
        if not isinstance(told, dict):
            return None
        if not all(type(number) is int and number >= 0 for number in told.values()):
            return None
        return {int(replica): number for replica, number in told.items()}
    except (ValueError, RecursionError):
        return None
