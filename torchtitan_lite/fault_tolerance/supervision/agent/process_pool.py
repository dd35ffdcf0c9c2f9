"""The processes of one machine: those of its ranks, spare ones, and those that end.

No method waits: a process that does not end is killed by a later `poll`.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.core.errors import FAILED, TRANSIENT
from torchtitan_lite.core.log import logger
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    RankState,
)
from torchtitan_lite.fault_tolerance.supervision.logs import mask_numbers
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure

_CAUSE_S = 0.5
"""After a rank reported an exception, time in which the death of another is found to be its
cause."""
EXIT_S = 10.0
"""Time for processes to end, and for the other ranks to end their training after an error that a
user must correct."""
_KILL_S = 5.0
"""Time in which a killed process must end, which a driver may delay without limit."""
_START_AGAIN_S = 1.0
"""Delay after a process could not be started, for lack of descriptors, processes or memory."""
_START_WITHIN_S = 600.0
"""Time without a start after which that is an error."""


@dataclass
class _Ending:
    """A process that ends."""

    process: RankProcess
    deadline_s: float
    """When it is killed; once it is, when it is forgotten."""
    is_killed: bool = False


class ProcessPool:
    """Starts, watches and ends processes."""

    def __init__(
        self, start: Callable[[], RankProcess], num_spares: int, log: logging.Logger = logger
    ) -> None:
        """`start` starts a process on standby; `num_spares` is the number of spare processes."""
        self._start, self._num_spares, self._log = start, num_spares, log
        self.ranks: dict[int, RankProcess] = {}
        """Processes by local rank."""
        self._spares: list[RankProcess] = []
        self._ending: list[_Ending] = []
        self._ended_at_s = 0.0
        self._has_started = False
        """Whether any process was started."""
        self._start_again_s = 0.0
        self._failing_since_s: float | None = None
        """Since when no process can be started; None if the last start succeeded."""

    @property
    def processes(self) -> list[RankProcess]:
        """All processes that are not ending."""
        return [*self.ranks.values(), *self._spares]

    @property
    def pids(self) -> set[int]:
        """Process ids of all processes that it waits for."""
        ending = (entry.process for entry in self._ending)
        return {process.pid for process in (*self.processes, *ending)}

    @property
    def have_finished(self) -> bool:
        """Whether all ranks have finished their training."""
        ended = [rank for rank in self.ranks.values() if rank.state is RankState.ENDED]
        is_clean = all(process.status is not None and process.status.is_clean for process in ended)
        return 0 < len(self.ranks) == len(ended) and is_clean

    @property
    def is_ending(self) -> bool:
        """Whether processes are ending, which may hold devices that their successors need."""
        return bool(self._ending)

    def poll(self) -> None:
        """Read what the processes report, and kill those that should have ended."""
        for process in self.processes:
            process.poll()
        self._spares = [spare for spare in self._spares if spare.state is not RankState.EXITED]
        now_s = time.monotonic()
        for entry in self._ending:
            entry.process.poll()
            if entry.process.state is RankState.EXITED or now_s < entry.deadline_s:
                continue
            if entry.is_killed:
                pid = entry.process.pid
                self._log.error("Process %d does not end after SIGKILL: a driver blocks it.", pid)
                self._ending = [other for other in self._ending if other is not entry]
            else:
                self._kill(entry)
        self._ending = [e for e in self._ending if e.process.state is not RankState.EXITED]

    def fill(self, num_ranks: int) -> None:
        """Give each rank that has no process a spare one, or else a new one, which may have to wait
        for a later call. Raises OSError."""
        for number in range(num_ranks):
            if number not in self.ranks:
                process = self._take_spare() or self._start_if_possible()
                if process is not None:
                    self.ranks[number] = process

    def forget_exited(self) -> None:
        """Forget the processes of ranks that have exited."""
        living = {n: p for n, p in self.ranks.items() if p.state is not RankState.EXITED}
        self.ranks = living

    def generation_started(self) -> None:
        """Forget what the ranks of an earlier generation have reported."""
        self._ended_at_s = 0.0

    def start_spares(self) -> None:
        """Start the missing spare processes, if possible. Raises OSError."""
        self._start_spares(self._num_spares)

    def prepare(self, num_ranks: int) -> bool:
        """Start the processes that so many ranks need; return whether all are warm. Raises
        OSError."""
        missing = num_ranks - len(self.ranks)
        self._start_spares(missing)
        return sum(spare.state is RankState.STANDBY for spare in self._spares) >= missing

    def end_surplus_ranks(self, num_ranks: int) -> None:
        """Kill the processes beyond so many ranks. They are on standby: their snapshots are in
        shared memory."""
        self.kill(self.ranks.keys() - range(num_ranks))

    def end_surplus_spares(self) -> None:
        """Kill the spares beyond the configured number, which a resize that is not followed has
        started."""
        self._spares.sort(key=lambda spare: spare.state is not RankState.STANDBY)
        surplus, self._spares = self._spares[self._num_spares :], self._spares[: self._num_spares]
        for spare in surplus:
            self._kill_later(spare)

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill the processes of ranks."""
        for number in sorted(ranks):
            self._kill_later(self.ranks.pop(number))

    def end(self, rank: int, status: int, timeout_s: float) -> None:
        """Order the process of a rank to exit with `status`, and kill it after `timeout_s`."""
        process = self.ranks.pop(rank)
        process.exit(status)
        self._ending.append(_Ending(process, time.monotonic() + timeout_s))

    def end_all(self, timeout_s: float, *, aborts: bool) -> None:
        """Order all processes to exit, and kill them after `timeout_s`. `aborts`: those that train
        abort their training."""
        for process in self.processes:
            if aborts:
                process.abort_training()
            process.exit(0)
            self._ending.append(_Ending(process, time.monotonic() + timeout_s))
        self.ranks, self._spares = {}, []

    def kill_all(self) -> None:
        """Kill all processes, also those that are ending."""
        for process in self.processes:
            self._kill_later(process)
        self.ranks, self._spares = {}, []
        for entry in self._ending:
            if not entry.is_killed:
                self._kill(entry)

    def failure(self, first_rank: int) -> Failure | None:
        """Return the first failure whose cause is known. Its `rank` is local; its description names
        that rank of the world, of which `first_rank` is the first on this machine."""
        gone = {n: p for n, p in self.ranks.items() if p.state is RankState.EXITED}
        if gone:
            rank, process = min(gone.items())
            assert process.status is not None
            if process.error and not process.status.is_signal:
                return self.exception(rank, first_rank)
            text, status = f"rank {first_rank + rank}: {process.status}", process.status
            signature = "" if status.is_signal or status.code == TRANSIENT else str(status)
            is_aborted = status.code == -signal.SIGABRT
            code = max(0, status.code)
            return Failure(text, signature, Path(os.devnull), rank, code, is_aborted=is_aborted)
        failed = {n: p for n, p in self.ranks.items() if p.error}
        ended = {n: p for n, p in self.ranks.items() if p.status and not p.status.is_clean}
        if ended:
            return self._user_error(ended, first_rank)
        deadlines_s = [p.failed_at_s + (EXIT_S if p.ends else _CAUSE_S) for p in failed.values()]
        if failed and time.monotonic() >= min(deadlines_s):
            return self.exception(self.first_exception(), first_rank)
        return None

    def first_exception(self) -> int:
        """Return the rank that was the first to report an exception."""
        failed = {number: process for number, process in self.ranks.items() if process.error}
        return min(failed, key=lambda number: failed[number].failed_at_s)

    def exception(self, rank: int, first_rank: int) -> Failure:
        """Return the failure of a rank that has reported an exception, see `failure`."""
        process = self.ranks[rank]
        text = f"rank {first_rank + rank}: {process.error}"
        signature = "" if process.may_pass else mask_numbers(process.error)
        status = TRANSIENT if process.may_pass else FAILED
        return Failure(text, signature, Path(os.devnull), rank, status)

    def _user_error(self, ended: dict[int, RankProcess], first_rank: int) -> Failure | None:
        """Return the failure of ranks that ended with an error that a user must correct, which has
        been logged, once all ranks have ended with it; None before."""
        self._ended_at_s = self._ended_at_s or time.monotonic()
        is_late = time.monotonic() >= self._ended_at_s + EXIT_S
        if not is_late and not all(p.error or is_idle(p) for p in self.ranks.values()):
            return None
        rank, process = min(ended.items())
        assert process.status is not None
        text, status = process.end_reason or str(process.status), process.status.code
        has_signature = process.may_restart and status != TRANSIENT
        signature = mask_numbers(text) if has_signature else ""
        return Failure(
            f"rank {first_rank + rank}: {text}", signature, Path(os.devnull), rank, status
        )

    def _start_spares(self, number: int) -> None:
        while len(self._spares) < number:
            process = self._start_if_possible()
            if process is None:
                return
            self._spares.append(process)

    def _start_if_possible(self) -> RankProcess | None:
        """Start a process; None if it cannot be started yet, because those that run must not end
        for lack of another one. Raises OSError if none was ever started, or none for long."""
        now_s = time.monotonic()
        if now_s < self._start_again_s:
            return None
        try:
            process = self._start()
        except OSError as error:
            since_s = self._failing_since_s
            if not self._has_started or (since_s and now_s - since_s > _START_WITHIN_S):
                raise
            if since_s is None:
                self._failing_since_s = now_s
                self._log.error(
                    "No process can be started: %s. Retried every %g s, for at most %g s.",
                    error,
                    _START_AGAIN_S,
                    _START_WITHIN_S,
                )
            self._start_again_s = now_s + _START_AGAIN_S
            return None
        self._has_started, self._failing_since_s = True, None
        return process

    def _take_spare(self) -> RankProcess | None:
        """Return a spare, one on standby if possible."""
        self._spares.sort(key=lambda spare: spare.state is not RankState.STANDBY)
        living = [spare for spare in self._spares if spare.state is not RankState.EXITED]
        if not living:
            return None
        self._spares.remove(living[0])
        return living[0]

    def _kill_later(self, process: RankProcess) -> None:
        """Kill a process, whose end a later `poll` finds."""
        entry = _Ending(process, 0.0)
        self._ending.append(entry)
        self._kill(entry)

    def _kill(self, entry: _Ending) -> None:
        entry.process.signal(signal.SIGKILL)
        entry.is_killed, entry.deadline_s = True, time.monotonic() + _KILL_S


def are_idle(processes: Collection[RankProcess]) -> bool:
    """Return whether no process trains."""
    return all(map(is_idle, processes))


def is_idle(process: RankProcess) -> bool:
    """Return whether a process does not train, or not yet."""
    return process.state not in (RankState.TRAINING, RankState.FAILED)
