"""The lease of a rank: the time until which its machine may train.

The agent renews it from its main loop, so that neither a cut network nor an agent that is blocked
leaves a rank training in a place that another machine has taken.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Set

from torchtitan_lite.core.output_fence import lease_clock_s
from torchtitan_lite.core.rank.processes import (
    Subreaper,
    become_subreaper,
    children_of,
    command_line,
    is_writer,
    signal_process,
)

_CHECK_S = 0.1
_REAP_S = 0.5


class Lease:
    """Kills this process if it trains after the end of its lease, and its checkpoint writer unless
    its training had finished."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self.is_training = False
        """Whether the process trains; one on standby needs no lease."""
        self.has_finished = False
        """Whether its training has ended by itself, so that its writer may complete the save."""

    def renew(self, until_s: float) -> None:
        """Extend the lease until then (`lease_clock_s`). Without a call, there is no limit."""
        is_first, self._until_s = self._until_s is None, until_s
        if is_first:
            threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def _watch(self) -> None:
        has_ended = False
        while True:
            time.sleep(_CHECK_S)
            had_ended, has_ended = has_ended, self._has_ended()
            if has_ended and (self.is_training or not (had_ended or self.has_finished)):
                kill_writers(os.getpid())
            if has_ended and self.is_training:
                os.kill(os.getpid(), signal.SIGKILL)

    def _has_ended(self) -> bool:
        return self._until_s is not None and lease_clock_s() > self._until_s


class Writers:
    """Checkpoint writers of a member's ranks. They outlive their ranks, and nothing limits them
    where no other machine can take the place that they write for."""

    def reap(self, started: Set[int]) -> None:
        """Reap those that have ended; `started` are the ranks, which their member waits for."""

    def check(self, *, may_write: bool) -> None:
        """Kill them if they may not write; again later, because ranks that are not on standby yet
        may start others."""

    def kill(self) -> None:
        """Kill them at once."""


class AdoptedWriters(Writers):
    """Checkpoint writers that must end with the lease of their machine."""

    def __init__(self) -> None:
        become_subreaper()
        self._subreaper, self._reaped_s, self._killed_s = Subreaper(), 0.0, -math.inf

    def reap(self, started: Set[int]) -> None:
        if time.monotonic() - self._reaped_s > _REAP_S:
            self._reaped_s = time.monotonic()
            self._subreaper.reap(started, self._reaped_s)

    def check(self, *, may_write: bool) -> None:
        if may_write:
            self._killed_s = -math.inf
        elif time.monotonic() - self._killed_s > _REAP_S:
            self.kill()
            self._killed_s = time.monotonic()

    def kill(self) -> None:
        kill_writers(os.getpid())


def kill_writers(parent: int) -> None:
    """Kill the checkpoint writers among the descendants of a process."""
    for pid in children_of(parent):
        if is_writer(command_line(pid)):
            signal_process(pid, signal.SIGKILL)
        else:
            kill_writers(pid)
