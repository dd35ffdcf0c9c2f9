"""Processes whose parent died, and that the launcher has adopted. Layer: above processes.

The writer of a checkpoint outlives its trainer on purpose, until the last snapshot is durable, and
then ends by itself: it is left alone, and so is what else is there meanwhile, since a trainer's log
filter serves its writer too. Any other orphan gets a moment to end, then is killed.
"""

import os
import signal
from collections.abc import Set
from contextlib import suppress
from itertools import pairwise

from torchtitan_lite.launcher.processes import children_of, command_line, signal_process

WRITER_MODULE = "torchtitan_lite.checkpoint.background"
_MOMENT_S = 1.0


def is_writer(words: list[str]) -> bool:
    """Whether a command line is that of a writer of checkpoints."""
    return ("-m", WRITER_MODULE) in pairwise(words)


class Orphans:
    """What this process has adopted. It must be a subreaper."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self.has_writer = False
        """Whether a writer was among them when this looked last."""

    def look(self, own: Set[int], now_s: float) -> None:
        """Wait for those that have ended and kill those that linger; `own` are the processes that
        were started here themselves."""
        found = set(children_of(os.getpid())) - own
        living = {pid for pid in found if not _reap(pid)}
        self.has_writer = any(is_writer(command_line(pid)) for pid in living)
        since = {} if self.has_writer else self._since_s
        self._since_s = {pid: since.get(pid, now_s) for pid in living}
        for pid, since_s in self._since_s.items():
            if not self.has_writer and now_s - since_s >= _MOMENT_S:
                signal_process(pid, signal.SIGKILL)

    @property
    def count(self) -> int:
        """How many there were when this looked last."""
        return len(self._since_s)


def _reap(pid: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True
