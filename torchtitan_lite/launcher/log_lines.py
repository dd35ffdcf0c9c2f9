"""Lines of logs: what is dropped from them, and what is shown of them. Layer: imports nothing of
the project."""

import re
from pathlib import Path

_CHATTER = b"[INFO] [torchft::"
_TAIL_BYTES = 1 << 16
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


def is_chatter(line: bytes) -> bool:
    """Whether torchft's compiled half says what nobody needs: eight such lines a step."""
    return _CHATTER in line


class LineFilter:
    """Takes a stream in pieces and gives its whole lines without the chatter."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, content: bytes) -> list[bytes]:
        """The lines that `content` completes, without their ends."""
        *lines, self._partial = (self._partial + content).split(b"\n")
        return [line for line in lines if not is_chatter(line)]


def last_lines(path: Path, count: int) -> list[str]:
    """At most `count` lines from the end of a log, without blank ones and chatter."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read()
    except OSError:
        return []
    lines = [line for line in content.split(b"\n") if line.strip() and not is_chatter(line)]
    return [line.decode(errors="replace").rstrip() for line in lines[-count:]]


def without_numbers(line: str) -> str:
    """What two lines that differ in times, ports and addresses have in common."""
    return _NUMBERS.sub("#", line)
