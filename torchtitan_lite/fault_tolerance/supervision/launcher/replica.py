"""One replica on this machine: a member of the run, its logs, its progress, and what users see."""

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path

from torchtitan_lite.core.diagnosis import Diagnosis
from torchtitan_lite.core.errors import TRANSIENT
from torchtitan_lite.core.outputs import quorum_name
from torchtitan_lite.core.rank.heartbeat import HEARTBEATS, HeartbeatMemory
from torchtitan_lite.core.rank.processes import kill_process_group, state_of
from torchtitan_lite.core.rank.supervised import GENERATION, RANK_LOGS, rank_log
from torchtitan_lite.fault_tolerance.supervision.agent.member import Member, MemberPhase
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import RankState
from torchtitan_lite.fault_tolerance.supervision.coordinator.messages import RunState
from torchtitan_lite.fault_tolerance.supervision.failures.failure_cause import (
    LOG_LINES,
    diagnose_failure,
)
from torchtitan_lite.fault_tolerance.supervision.failures.hang_detection import STOPPED, RankStatus
from torchtitan_lite.fault_tolerance.supervision.failures.hang_diagnosis import (
    HangMonitor,
    has_newer_flight_record,
    newer_flight_records,
    request_flight_record,
)
from torchtitan_lite.fault_tolerance.supervision.logs import (
    ReplicaProgress,
    last_lines,
    make_log_folder,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import Failure, GiveUp

_MAX_LINE_CHARS = 300
_STOPPED_BY_OTHERS = "saved and left, because a process other than the launcher asked it to stop"
_EXAMINE_S = 1.0
"""Longest time for the other ranks to write their flight records after an error in one of them."""
_READ_INTERVAL_S = 0.25
"""Interval between reads of a replica's files."""


class ReplicaState(Enum):
    """State of a replica. The values are displayed."""

    WAITING = "waiting"
    STARTING = "starting"
    TRAINING = "training"
    HEALING = "healing"
    ENDING = "ending"
    """A rank has failed; the others return to standby."""
    RESTARTING = "restarting"
    RESIZING = "resizing"
    """Its ranks leave the training, or have left it, for another mesh."""
    LEAVING = "leaving"
    FINISHED = "finished"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


_OVER = {ReplicaState.FINISHED, ReplicaState.STOPPED, ReplicaState.GIVEN_UP}
_RUNNING = {ReplicaState.STARTING, ReplicaState.TRAINING, ReplicaState.HEALING}


class Replica:
    """Replica, from its first generation to its end. It is the `MonitoredRanks` of the present
    generation."""

    def __init__(
        self,
        number: int,
        *,
        max_ranks: int,
        folder: Path,
        metrics: Path,
        environment: Mapping[str, str],
        on_failure: Callable[["Replica", int | None], None],
        report_event: Callable[[str], None],
        report_diagnosis: Callable[[Diagnosis], None],
    ) -> None:
        """It has at most `max_ranks`. Each generation logs into a new folder in `folder`; `metrics`
        is the metrics.jsonl of this replica; `environment` is that of its processes. `on_failure`
        is called with the rank that failed, as soon as a generation has failed, while its other
        ranks still train. `report_event` reports events to the user, `report_diagnosis` which
        process is at fault."""
        self.number = number
        self.state = ReplicaState.WAITING
        self.last_event = ""
        self.num_restarts = 0
        self.progress: ReplicaProgress | None = None
        self.given_up: GiveUp | None = None
        self.was_killed = False
        """Whether it exceeded the time limit of a stop request."""
        self.log_folder, self._metrics = folder, metrics
        self._on_failure, self._report_event = on_failure, report_event
        self._report_diagnosis = report_diagnosis
        self.folder = folder
        """Where the present generation logs."""
        self.leader_log: Path | None = None
        """Log of rank 0 of the newest generation."""
        self.rank_pids: Mapping[int, int] = {}
        """Process ids of the living ranks, by rank."""
        self.requests: list[int] = []
        """Signals to forward to the ranks."""
        self.log = logging.Logger(f"replica {number}")
        """Errors of its member, which become events."""
        self.log.addHandler(_EventHandler(self._report))
        self.log.setLevel(logging.ERROR)
        self._heartbeats = HeartbeatMemory(max_ranks)
        self.environment: Mapping[str, str] = {**environment, HEARTBEATS: self._heartbeats.path}
        """Environment of its processes."""
        self._member: Member | None = None
        self._hang_monitor: HangMonitor | None = None
        self._generation = self._num_generations = 0
        """Number of the present generation of its member, and of all generations."""
        self._num_folders = 0
        """Log folders of generations, also of earlier launches. Counted once: later, the launcher
        may have no free descriptor."""
        self._is_stopping = self._leaves_to_resize = self._is_leave_broken = False
        self._read_at_s = 0.0
        self._failure: Failure | None = None
        """The failure that ends the present generation."""
        self._hang: Failure | None = None
        """The hang of the present generation, whose ranks were killed for it."""
        self._examine_until_s, self._failed_at_ns = 0.0, 0
        self._asked: set[int] = set()
        """Ranks that write their flight records after the failure."""
        self._restart_s: Callable[[], float] = lambda: 0.0

    @property
    def name(self) -> str:
        """Name at the lighthouse."""
        return quorum_name(self.number)

    @property
    def is_over(self) -> bool:
        """Whether it is done: nothing runs, and nothing will be started."""
        return self.state in _OVER

    @property
    def has_left(self) -> bool:
        """Whether no process of it runs, so that it can be started with another number of ranks."""
        return self._member is None and (self.is_over or self.state is ReplicaState.RESIZING)

    @property
    def is_training(self) -> bool:
        """Whether it trains, or is about to with the state of another replica."""
        return self.state in (ReplicaState.TRAINING, ReplicaState.HEALING)

    @property
    def pid(self) -> int:
        """Process id of the process that starts the ranks."""
        return os.getpid()

    @property
    def pids(self) -> set[int]:
        """Ids of its processes, and of a running hang diagnosis."""
        pids = set() if self._member is None else self._member.pids
        diagnosis = None if self._hang_monitor is None else self._hang_monitor.pid
        return pids if diagnosis is None else {*pids, diagnosis}

    def restarts_in_s(self, now_s: float) -> float:
        """Return the seconds until the next generation; 0 if none is scheduled."""
        if self.state is not ReplicaState.RESTARTING:
            return 0.0
        return max(0.0, self._restart_s() - now_s)

    def start(self, member: Member, restart_s: Callable[[], float]) -> None:
        """Start its first generation, or the first one after `leave_to_resize`. `restart_s` returns
        when the next generation may start."""
        self._leaves_to_resize = self._is_leave_broken = False
        self.requests.clear()
        self._member, self._restart_s, self._generation = member, restart_s, 0
        self.state = ReplicaState.STARTING

    def poll(self, now_s: float) -> None:
        """Check the processes and files of the generation, and act on changes."""
        member = self._member
        if member is None:
            return
        member.poll()
        self._show_rank_pids(
            {
                number: process.pid
                for number, process in member.ranks.items()
                if process.state in (RankState.TRAINING, RankState.FAILED, RankState.ENDED)
            }
        )
        match member.phase:
            case MemberPhase.ENDED:
                self._handle_end(member)
            case MemberPhase.STARTING | MemberPhase.TRAINING:
                self._follow_generation(member, now_s)
            case MemberPhase.WAITING if self._generation:
                self._await_generation(member, now_s)
            case MemberPhase.STOPPING | MemberPhase.ENDING:
                self._close_hang_monitor()
            case _:
                pass

    def generation_environment(self, generation: int) -> Mapping[str, str]:
        """Return variables of the ranks of a generation of the member."""
        assert generation == self._generation
        return {
            RANK_LOGS: str(self.folder),
            # The member may not be the first of this replica.
            GENERATION: str(self._num_generations - 1),
        }

    def may_end(self, failure: Failure) -> bool:
        """Return whether all ranks that live have written what a failure is compared with; if so,
        diagnose it: once the generation ends, they fail, too."""
        if self._leaves_to_resize and not self._is_leave_broken:
            # Without this rank's part, the other ranks cannot complete their save, nor take part.
            self._is_leave_broken = True
            self._on_failure(self, None)
        if self._is_stopping or self._leaves_to_resize:
            if self._failure is not None:
                self._diagnose(self._failure)
            return True
        now_s = time.monotonic()
        if self._failure is None:
            self._handle_failure(failure, now_s)
            assert self._failure is not None
        is_examined = all(
            has_newer_flight_record(self.folder, rank, self._failed_at_ns)
            for rank in self._asked & self.rank_pids.keys()
        )
        if not is_examined and now_s < self._examine_until_s:
            return False
        self._diagnose(self._failure)
        return True

    def stop(self) -> None:
        """Request that the replica saves and leaves."""
        self._is_stopping = True
        if self._member is None:
            if not self.is_over:
                self.state = ReplicaState.STOPPED
        elif not self.is_over:
            self.state = ReplicaState.LEAVING
            self.requests.append(signal.SIGTERM)

    def leave_to_resize(self) -> None:
        """Request that the replica saves and leaves, and then waits for `start`."""
        if self._member is not None:
            self._leaves_to_resize = True
            self.requests.append(signal.SIGTERM)
            self.state = ReplicaState.RESIZING

    def kill(self) -> None:
        """Kill its processes."""
        if self._member is not None:
            if self.state is ReplicaState.LEAVING and not self.was_killed:
                self.was_killed = True
                self._report("killed before it had left")
            self._member.kill()

    def close(self) -> None:
        """Release what it holds, once the run has ended."""
        self._close_hang_monitor()
        self._heartbeats.close()

    def rank_statuses(self) -> list[RankStatus]:
        """Return the status of the ranks that have not exited."""
        statuses = []
        for number, pid in self.rank_pids.items():
            heartbeat = self._heartbeats.read(number)
            if heartbeat is not None and heartbeat.pid != pid:
                heartbeat = None
            statuses.append(RankStatus(number, pid, heartbeat, state_of(pid)))
        return statuses

    def _begin_generation(self, generation: int) -> None:
        self._generation, self._failure, self._hang = generation, None, None
        self.num_restarts += self.state is ReplicaState.RESTARTING
        self._num_generations += 1
        self._num_folders = self._num_folders or _num_folders(self.log_folder)
        self._num_folders += 1
        self.folder = make_log_folder(self.log_folder / f"generation_{self._num_folders - 1:02d}")
        self._close_hang_monitor()
        self._hang_monitor = HangMonitor(self)
        self.leader_log = rank_log(self.folder, 0)
        self.progress = ReplicaProgress(self._metrics, self.leader_log)
        if self.state is not ReplicaState.LEAVING:
            self.state = ReplicaState.STARTING
        self._report(f"started, logs in {self.folder}")

    def _follow_generation(self, member: Member, now_s: float) -> None:
        if member.generation != self._generation:
            self._begin_generation(member.generation)
        if member.is_resizing and self.state in _RUNNING:
            # Ranks that leave, and those that wait for others, make no progress.
            self._close_hang_monitor()
            self.state = ReplicaState.RESIZING
        if self.state in _RUNNING and self._failure is None and now_s >= self._read_at_s:
            self._read_progress(now_s)
            self._check_for_hang(now_s)

    def _read_progress(self, now_s: float) -> None:
        assert self.progress is not None
        self._read_at_s = now_s + _READ_INTERVAL_S
        self.progress.update()
        before = self.state
        if self.progress.is_healing:
            self.state = ReplicaState.HEALING
        elif self.progress.last_step is not None:
            self.state = ReplicaState.TRAINING
        if before is not self.state:
            self._report(f"{self.state.value}{self._at_step()}")

    def _check_for_hang(self, now_s: float) -> None:
        if self._hang_monitor is None:
            return
        was_looked_into = self._hang_monitor.pid is not None
        hang = self._hang_monitor.poll(now_s)
        if hang is not None:
            self._hang = hang
            self._close_hang_monitor()
            pids = self.rank_pids
            for rank in pids if hang.rank is None else pids.keys() & {hang.rank}:
                kill_process_group(pids[rank])
        elif was_looked_into and self._hang_monitor.pid is None:
            self._report("continues: it was only slow")
        elif not was_looked_into and self._hang_monitor.pid is not None:
            self._report("makes no progress: diagnosing the hang")

    def _show_rank_pids(self, pids: Mapping[int, int]) -> None:
        """Report new ranks, and write the process id of each rank to a file."""
        if pids == self.rank_pids:
            return
        # Without the files (a full disk), the events have them.
        with suppress(OSError):
            for rank in self.rank_pids.keys() - pids.keys():
                self._pid_file(rank).unlink(missing_ok=True)
            for rank, pid in pids.items():
                self._pid_file(rank).write_text(f"{pid}\n")
        new = dict(sorted(pids.items() - self.rank_pids.items()))
        if new:
            named = ", ".join(f"rank {rank} is process {pid}" for rank, pid in new.items())
            self._report_event(f"replica {self.number}: {named}")
        self.rank_pids = pids

    def _pid_file(self, rank: int) -> Path:
        return self.log_folder / f"rank_{rank}.pid"

    def _close_hang_monitor(self) -> None:
        if self._hang_monitor is not None:
            self._hang_monitor.close()
            self._hang_monitor = None

    def _handle_failure(self, failure: Failure, now_s: float) -> None:
        assert self._member is not None and failure.rank is not None
        self._close_hang_monitor()
        # The description has an exception that was reported.
        has_error = bool(self._member.ranks[failure.rank].error)
        self._failure = self._hang or replace(failure, log=self._log_of(failure.rank))
        self._examine_until_s, self._failed_at_ns, self._asked = now_s, time.time_ns(), set()
        failure = self._failure
        if failure.has_error and not (failure.names_itself or failure.status == TRANSIENT):
            # Its error may be the effect of another rank's. A stopped rank does not answer.
            self._examine_until_s += _EXAMINE_S
            self._asked = {
                rank
                for rank, pid in self.rank_pids.items()
                if state_of(pid) != STOPPED and request_flight_record(pid)
            }
        self._on_failure(self, failure.rank)
        self.state = ReplicaState.ENDING
        self._report(f"failed, {failure.description}")
        if failure.signature and not has_error and (lines := last_lines(failure.log, 1)):
            line = "".join(filter(str.isprintable, lines[0]))[:_MAX_LINE_CHARS]
            self._report_event(f"replica {self.number}: {failure.log} ends with: {line}")

    def _log_of(self, rank: int) -> Path:
        """Return the log that has the error of a rank, which may not have got that far."""
        log = rank_log(self.folder, rank)
        return log if last_lines(log, 1) else process_log(self.log_folder)

    def _diagnose(self, failure: Failure) -> None:
        assert self._member is not None
        records = newer_flight_records(self.folder, range(len(self._member.ranks)), 0)
        lines = last_lines(failure.log, LOG_LINES)
        diagnosis = diagnose_failure(failure, self.number, lines, records)
        if diagnosis is not None:
            self._report_diagnosis(diagnosis)

    def _await_generation(self, member: Member, now_s: float) -> None:
        """Report once that a generation has ended and another one follows."""
        answer = member.answer
        has_ended = self.state in _RUNNING or self.state is ReplicaState.ENDING
        if not has_ended or answer is None or answer.state is RunState.ENDED:
            return
        if member.is_resizing:
            self.state = ReplicaState.RESIZING
            return
        if any(process.was_stopped for process in member.ranks.values()):
            # The launcher and its user still want this replica.
            self._report(_STOPPED_BY_OTHERS)
        elif self.state is not ReplicaState.ENDING:
            self._report(answer.reason)
        self.state = ReplicaState.RESTARTING
        self._report(f"restarts in {self.restarts_in_s(now_s):.1f} s")

    def _handle_end(self, member: Member) -> None:
        """Handle the end of its member, after all processes have exited."""
        self._member = None
        self._close_hang_monitor()
        answer = member.answer
        if self.progress is not None:
            # It may have taken more steps since it was asked to leave.
            self.progress.update()
        has_failed = answer is not None and answer.state is RunState.ENDED and answer.status
        if self._leaves_to_resize and not self._is_stopping and not has_failed:
            self.state = ReplicaState.RESIZING
            self._report("left to resize")
        elif self._is_stopping:
            self.state = ReplicaState.STOPPED
            self._report(f"left{self._at_step()}")
        elif member.exit_status == 0:
            self.state = ReplicaState.FINISHED
            self._report(f"finished{self._at_step()}")
        else:
            reason = "" if answer is None else answer.reason
            failure = self._failure or Failure(reason, "", process_log(self.log_folder))
            self.state, self.given_up = ReplicaState.GIVEN_UP, GiveUp(reason, failure)
            self._report("given up")

    def _report(self, event: str) -> None:
        self.last_event = f"{time.strftime('%H:%M:%S')} {event}"
        self._report_event(f"replica {self.number}: {event}")

    def _at_step(self) -> str:
        record = None if self.progress is None else self.progress.last_step
        return "" if record is None else f" at step {record['step']}"


class _EventHandler(logging.Handler):
    """Handler that reports records as events."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report(record.getMessage())


def process_log(folder: Path) -> Path:
    """Return the log of processes that have no rank yet, in the log folder of a replica."""
    return folder / "processes.log"


def _num_folders(folder: Path) -> int:
    """Return the number of the log folder of the next generation. Folders of an earlier launch are
    kept."""
    endings = (path.name.rpartition("_")[2] for path in folder.glob("generation_*"))
    taken = (int(ending) for ending in endings if ending.isdigit())
    return max(taken, default=-1) + 1
