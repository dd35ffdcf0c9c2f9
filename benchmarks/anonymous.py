"""The memory that no file holds, watched while something goes on."""

import threading
from contextlib import suppress
from pathlib import Path

import psutil

_POLL_S = 0.002


class AnonymousPeak:
    """What this process and those that it started hold at most, beyond what they held before, in a
    `with` block. Shared memory and mapped files are not counted."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "AnonymousPeak":
        self._before = _anonymous_bytes()
        self._watcher.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            self.bytes = max(self.bytes, _anonymous_bytes() - self._before)


def _anonymous_bytes() -> int:
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) * 1024
    return total
