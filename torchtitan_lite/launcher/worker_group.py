"""One attempt of a replica: a torchrun and its ranks. Layer: above processes and supervised.

torchrun polls its ranks only every few seconds, and waits for the remaining ranks after a failure.
Therefore the ranks are watched here, through pidfds, which report an exit at once.
"""

import os
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.launcher.hang_detection import RankStatus
from torchtitan_lite.launcher.heartbeat import HEARTBEATS, HeartbeatMemory
from torchtitan_lite.launcher.logs import last_lines, make_log_folder, open_log
from torchtitan_lite.launcher.processes import (
    ExitStatus,
    children_of,
    environment_of,
    exit_status_of,
    kill_process_group,
    signal_process,
    spawn,
    state_of,
)
from torchtitan_lite.launcher.restart_policy import Failure, failure_of
from torchtitan_lite.launcher.supervised import LAUNCHER_PID, RANK_LOGS, rank_log


@dataclass
class _RankProcess:
    """Process of a rank, started by torchrun."""

    number: int
    pid: int
    descriptor: int
    """pidfd, readable once the process has exited; -1 after its exit was handled."""


class WorkerGroup:
    """torchrun and its ranks."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        num_ranks: int,
        folder: Path,
    ) -> None:
        """Start `command`; logs go to `folder`, which is created. Raises OSError."""
        folder = make_log_folder(folder)
        self._num_ranks, self.folder, self.environment = num_ranks, folder, environment
        self._heartbeats = HeartbeatMemory(num_ranks)
        with open_log(self._torchrun_log) as log:
            self._torchrun = spawn(
                command,
                {
                    **environment,
                    LAUNCHER_PID: str(os.getpid()),
                    RANK_LOGS: str(folder),
                    HEARTBEATS: self._heartbeats.path,
                },
                stdout=log.fileno(),
            )
        self._descriptor = os.pidfd_open(self._torchrun.pid)
        self._ranks: dict[int, _RankProcess] = {}
        self._first_failure: tuple[int | None, ExitStatus, Path] | None = None
        """Rank (None for torchrun), exit status and log of the first failure."""
        self._hang: Failure | None = None
        self._num_clean = 0
        self.stopped_early = False
        """Whether its ranks were asked to stop and exited before the last step; known after
        `close`."""

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the processes that are not known to have exited; readable after an
        exit."""
        ranks = (rank.descriptor for rank in self._ranks.values())
        return [one for one in (self._descriptor, *ranks) if one >= 0]

    @property
    def pid(self) -> int:
        """Process id of torchrun."""
        return self._torchrun.pid

    @property
    def has_ended(self) -> bool:
        """Whether torchrun and all its known ranks have exited."""
        return not self.descriptors

    @property
    def has_finished(self) -> bool:
        """Whether all ranks have exited successfully."""
        return self._num_clean == self._num_ranks or self._torchrun.returncode == 0

    @property
    def has_failed(self) -> bool:
        """Whether a rank or torchrun has failed, or the group hangs."""
        return self._first_failure is not None or self._hang is not None

    @property
    def leader_log(self) -> Path:
        """Log of rank 0."""
        return rank_log(self.folder, 0)

    def poll(self) -> None:
        """Find new ranks, and handle processes that have exited."""
        if len(self._ranks) < self._num_ranks and self._torchrun.returncode is None:
            self._find_ranks()
        self._poll_torchrun()
        ended = [rank for rank in self._ranks.values() if _has_exited(rank.descriptor)]
        seen = [(rank, exit_status_of(rank.pid)) for rank in ended]
        for rank in ended:
            os.close(rank.descriptor)
            rank.descriptor = -1
        # If torchrun has waited for a rank first, torchrun reacts to its exit.
        statuses = [(rank.number, status) for rank, status in seen if status is not None]
        self._num_clean += sum(status.is_clean for _, status in statuses)
        bad = [(number, status) for number, status in statuses if not status.is_clean]
        if bad and self._first_failure is None:
            # Prefer a rank that exited with an error, whose log has the cause, to one that was
            # killed.
            number, status = min(bad, key=lambda one: (one[1].is_signal, one[0]))
            self._first_failure = (number, status, rank_log(self.folder, number))
        if self._descriptor < 0 and not self.has_finished and self._first_failure is None:
            status = ExitStatus(self._torchrun.returncode or 0)
            self._first_failure = (None, status, self._torchrun_log)
        if self._num_clean == self._num_ranks and self._torchrun.returncode is None:
            # torchrun would notice by itself, but later.
            kill_process_group(self._torchrun.pid)

    def rank_statuses(self) -> list[RankStatus]:
        """Return the status of the ranks that have not exited."""
        living = sorted(self._ranks.values(), key=lambda rank: rank.number)
        return [
            RankStatus(
                rank.number, rank.pid, self._heartbeats.read(rank.number), state_of(rank.pid)
            )
            for rank in living
            if rank.descriptor >= 0
        ]

    def mark_hung(self, failure: Failure) -> None:
        """Count the group as failed although its processes still run."""
        self._hang = failure

    def failure(self) -> Failure:
        """Return how the group failed. Complete only after its processes have exited."""
        if self._hang is not None:
            return self._hang
        assert self._first_failure is not None
        rank, status, log = self._first_failure
        name = "torchrun" if rank is None else f"rank {rank}"
        # The error of a rank that could not even start is in torchrun's output.
        return failure_of(name, status, log if last_lines(log, 1) else self._torchrun_log, rank)

    def terminate(self) -> None:
        """Request that all ranks save and leave. torchrun forwards the signal."""
        if self._torchrun.returncode is None:
            signal_process(self._torchrun.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill torchrun and all ranks."""
        if self._torchrun.returncode is None:
            # Stop torchrun first, so that it starts no further ranks.
            signal_process(self._torchrun.pid, signal.SIGSTOP)
            self._find_ranks()
        for rank in self._ranks.values():
            kill_process_group(rank.pid)
        if self._torchrun.returncode is None:
            kill_process_group(self._torchrun.pid)

    def close(self) -> None:
        """Release the shared memory, after the group has ended."""
        self.stopped_early = self._heartbeats.any_stopped_early()
        self._heartbeats.close()

    @property
    def _torchrun_log(self) -> Path:
        return self.folder / "torchrun.log"

    def _poll_torchrun(self) -> None:
        if not _has_exited(self._descriptor):
            return
        code = self._torchrun.wait()
        os.close(self._descriptor)
        self._descriptor = -1
        if code < 0 and not self.has_finished and self._first_failure is None:
            # The ranks of a killed torchrun die with it.
            self._first_failure = (None, ExitStatus(code), self._torchrun_log)

    def _find_ranks(self) -> None:
        for pid in children_of(self._torchrun.pid):
            if pid in self._ranks:
                continue
            number = environment_of(pid).get("RANK", "")
            # Between fork and exec, the child is still a copy of torchrun, without a rank.
            if number.isdigit():
                self._watch(pid, int(number))

    def _watch(self, pid: int, number: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._ranks[pid] = _RankProcess(number, pid, descriptor)


def _has_exited(descriptor: int) -> bool:
    if descriptor < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def torchrun_command(python: str, num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the torchrun command of one replica on this machine; `arguments` begin with the
    program."""
    return [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        "--max-restarts=0",
        # torchrun polls seldom, because the exit status of a rank that it has waited for is lost to
        # the launcher.
        "--monitor-interval=5",
        *arguments,
    ]
