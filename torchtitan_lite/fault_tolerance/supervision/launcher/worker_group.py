"""One generation of a replica: its ranks, and the process that starts them.

The parent of the ranks is `local_ranks` or an agent (`rank_recovery`). The agent replaces a rank
that dies, so that only its own end is a failure. Otherwise the ranks are watched here, because the
others must be killed as soon as one has failed.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.core.rank.heartbeat import HEARTBEATS, HeartbeatMemory
from torchtitan_lite.core.rank.processes import (
    ExitStatus,
    children_of,
    environment_of,
    exit_status_of,
    first_failed,
    kill_process_group,
    signal_process,
    spawn,
    state_of,
    wait_readable,
)
from torchtitan_lite.core.rank.supervised import LAUNCHER_PID, RANK_LOGS, rank_log
from torchtitan_lite.fault_tolerance.supervision.failures.hang_detection import RankStatus
from torchtitan_lite.fault_tolerance.supervision.logs import (
    last_lines,
    make_log_folder,
    open_log,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure, failure_of


@dataclass
class _RankProcess:
    """Process of a rank, or a spare of an agent."""

    number: int | None
    """None until the process has a rank."""
    pid: int
    descriptor: int
    """pidfd, readable once the process has exited; -1 after its exit was handled."""


class WorkerGroup:
    """The ranks and their parent."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        num_ranks: int,
        folder: Path,
        *,
        has_agent: bool = False,
    ) -> None:
        """Start `command`, the parent of the ranks, which replaces dead ones if `has_agent`, and
        then may have fewer than `num_ranks`; logs go to `folder`, which is created. Raises
        OSError."""
        folder = make_log_folder(folder)
        self.num_ranks, self.folder, self.environment = num_ranks, folder, environment
        self._parent_name = "agent" if has_agent else "parent"
        self.replaces_ranks = has_agent
        """Whether a rank that dies is replaced while the others keep their processes."""
        self._lost: list[Failure] = []
        self._killed: set[int] = set()
        """Processes of hung ranks that were killed, and that the agent replaces."""
        self._heartbeats = HeartbeatMemory(num_ranks)
        with open_log(self._parent_log) as log:
            self._parent = spawn(
                command,
                {
                    **environment,
                    LAUNCHER_PID: str(os.getpid()),
                    RANK_LOGS: str(folder),
                    HEARTBEATS: self._heartbeats.path,
                },
                stdout=log.fileno(),
            )
        self._descriptor = os.pidfd_open(self._parent.pid)
        self._ranks: dict[int, _RankProcess] = {}
        self._ended: set[int] = set()
        """Processes that have been forgotten, but that the agent may not have waited for yet."""
        self._first_failure: tuple[int | None, ExitStatus, Path] | None = None
        """Rank (None for its parent), exit status and log of the first failure."""
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
        return [descriptor for descriptor in (self._descriptor, *ranks) if descriptor >= 0]

    @property
    def pid(self) -> int:
        """Process id of the ranks' parent."""
        return self._parent.pid

    @property
    def has_ended(self) -> bool:
        """Whether the parent and all its known ranks have exited."""
        return not self.descriptors

    @property
    def has_finished(self) -> bool:
        """Whether all ranks have exited successfully."""
        return self._num_clean == self.num_ranks or self._parent.returncode == 0

    @property
    def has_failed(self) -> bool:
        """Whether the group has failed: the parent, a rank that is not replaced, or by a hang."""
        return self._first_failure is not None or self._hang is not None

    @property
    def leader_log(self) -> Path:
        """Log of rank 0."""
        return rank_log(self.folder, 0)

    def poll(self) -> None:
        """Find new ranks, and handle processes that have exited."""
        is_complete = len(self._ranks) == self.num_ranks and not self.replaces_ranks
        if not is_complete and self._parent.returncode is None:
            self._find_ranks()
        self._poll_parent()
        living = [rank for rank in self._ranks.values() if rank.descriptor >= 0]
        descriptors = wait_readable(rank.descriptor for rank in living)
        ended = [rank for rank in living if rank.descriptor in descriptors]
        seen = [(rank, exit_status_of(rank.pid)) for rank in ended]
        for rank in ended:
            os.close(rank.descriptor)
            rank.descriptor = -1
        if self.replaces_ranks:
            self._forget_ended(seen)
            return self._find_end()
        # If the parent has waited for a rank first, the parent reacts to its exit.
        statuses = [
            (rank.number, status)
            for rank, status in seen
            if status is not None and rank.number is not None
        ]
        self._num_clean += sum(status.is_clean for _, status in statuses)
        failed = first_failed(statuses)
        if failed is not None and self._first_failure is None:
            self._first_failure = (*failed, rank_log(self.folder, failed[0]))
        self._find_end()

    def take_lost_ranks(self) -> list[Failure]:
        """Return how ranks have died in their training since the last call. The agent replaces
        them. A rank that `end_hang` has killed is a hang without a cause: it was reported."""
        lost, self._lost = self._lost, []
        return lost

    def _forget_ended(self, ended: Sequence[tuple[_RankProcess, ExitStatus | None]]) -> None:
        """Forget processes of an agent that have exited, whose ids may belong to others soon, and
        record the ranks among them."""
        heartbeats = self._ranks_with_heartbeats() if ended else {}
        for process, status in ended:
            kill_process_group(process.pid)
            del self._ranks[process.pid]
            self._ended.add(process.pid)
            # A rank that has left its training has erased its heartbeat. Without the agent all
            # ranks die.
            if process.pid in heartbeats and self._descriptor >= 0:
                self._lost.append(self._lost_rank(heartbeats[process.pid], process.pid, status))

    def _lost_rank(self, rank: int, pid: int, status: ExitStatus | None) -> Failure:
        log = rank_log(self.folder, rank)
        if pid in self._killed:
            self._killed.remove(pid)
            return Failure(f"rank {rank}: killed after its hang", "", log, rank, is_hang=True)
        if status is None:
            # The agent has waited for it first.
            return Failure(f"rank {rank}: died", "", log, rank, has_unknown_status=True)
        return failure_of(f"rank {rank}", status, log, rank)

    def _find_end(self) -> None:
        if self._descriptor < 0 and not self.has_finished and self._first_failure is None:
            status = ExitStatus(self._parent.returncode or 0)
            self._first_failure = (None, status, self._parent_log)

    def rank_statuses(self) -> list[RankStatus]:
        """Return the status of the ranks that have not exited."""
        living = {
            rank.number: rank.pid
            for rank in self._ranks.values()
            if rank.number is not None and rank.descriptor >= 0
        }
        return [
            RankStatus(number, pid, self._heartbeats.read(number), state_of(pid))
            for number, pid in sorted(living.items())
        ]

    def rank_pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that have not exited, by rank. Spare processes have
        no rank."""
        pids = {rank.pid: rank.number for rank in self._ranks.values() if rank.descriptor >= 0}
        if self.replaces_ranks:
            # A process may get another rank.
            ranks = self._ranks_with_heartbeats()
            pids = {pid: ranks.get(pid) for pid in pids}
        return {rank: pid for pid, rank in sorted(pids.items()) if rank is not None}

    def end_hang(self, failure: Failure) -> None:
        """Kill the rank that hangs if it is replaced; else count the group as failed although its
        processes still run."""
        hung = [
            rank_status.pid
            for rank_status in self.rank_statuses()
            if rank_status.number == failure.rank
        ]
        if self.replaces_ranks and hung:
            self._killed.add(hung[0])
            kill_process_group(hung[0])
        else:
            self._hang = failure

    def failure(self) -> Failure:
        """Return how the group failed. Complete only after its processes have exited."""
        if self._hang is not None:
            return self._hang
        assert self._first_failure is not None
        rank, status, log = self._first_failure
        name = self._parent_name if rank is None else f"rank {rank}"
        # The error of a rank that could not even start is in its parent's output.
        return failure_of(name, status, log if last_lines(log, 1) else self._parent_log, rank)

    def terminate(self) -> None:
        """Request that all ranks save and leave. The parent forwards the signal."""
        if self._parent.returncode is None:
            signal_process(self._parent.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the parent, all ranks and spares."""
        if self._parent.returncode is None:
            # Stop the parent first, so that it starts no further ranks.
            signal_process(self._parent.pid, signal.SIGSTOP)
            self._find_ranks()
        for pid in self._ranks:
            kill_process_group(pid)
        if self._parent.returncode is None:
            kill_process_group(self._parent.pid)

    def close(self) -> None:
        """Release the shared memory, after the group has ended."""
        self.stopped_early = self._heartbeats.any_stopped_early()
        self._heartbeats.close()

    @property
    def _parent_log(self) -> Path:
        return self.folder / f"{self._parent_name}.log"

    def _poll_parent(self) -> None:
        if self._descriptor < 0 or not wait_readable([self._descriptor]):
            return
        code = self._parent.wait()
        os.close(self._descriptor)
        self._descriptor = -1
        if code < 0 and not self.has_finished and self._first_failure is None:
            # The ranks of a killed parent die with it.
            self._first_failure = (None, ExitStatus(code), self._parent_log)

    def _find_ranks(self) -> None:
        children = set(children_of(self._parent.pid))
        self._ended &= children
        new = sorted(children - self._ended - self._ranks.keys())
        if self.replaces_ranks:
            for pid in new:
                self._watch(pid, None)
            # They receive their ranks after their start.
            if any(rank.number is None for rank in self._ranks.values()):
                for pid, number in self._ranks_with_heartbeats().items():
                    if pid in self._ranks:
                        self._ranks[pid].number = number
            return
        for pid in new:
            number = environment_of(pid).get("RANK", "")
            # Between fork and exec, the child is still a copy of its parent, without a rank.
            if number.isdigit():
                self._watch(pid, int(number))

    def _ranks_with_heartbeats(self) -> dict[int, int]:
        """Return the ranks that send heartbeats, by process id."""
        heartbeats = ((rank, self._heartbeats.read(rank)) for rank in range(self.num_ranks))
        return {heartbeat.pid: rank for rank, heartbeat in heartbeats if heartbeat is not None}

    def _watch(self, pid: int, number: int | None) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._ranks[pid] = _RankProcess(number, pid, descriptor)
