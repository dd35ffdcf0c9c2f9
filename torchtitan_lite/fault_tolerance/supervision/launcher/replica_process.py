"""One replica: its consecutive generations.

Invariant: a generation starts only after all processes of the previous one have exited.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path

from torchtitan_lite.core.diagnosis import Diagnosis
from torchtitan_lite.core.errors import TRANSIENT
from torchtitan_lite.core.outputs import quorum_name
from torchtitan_lite.core.rank.processes import state_of
from torchtitan_lite.fault_tolerance.supervision.failures.failure_cause import (
    LOG_LINES,
    diagnose_failure,
)
from torchtitan_lite.fault_tolerance.supervision.failures.flight_records import FlightRecord
from torchtitan_lite.fault_tolerance.supervision.failures.hang_detection import STOPPED
from torchtitan_lite.fault_tolerance.supervision.failures.hang_diagnosis import (
    HangMonitor,
    has_newer_flight_record,
    newer_flight_records,
    request_flight_record,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.worker_group import WorkerGroup
from torchtitan_lite.fault_tolerance.supervision.logs import ReplicaProgress, last_lines
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    Permission,
    ResizeAnswer,
    ResizeRequest,
    permit,
    read_answer,
    send_request,
)
from torchtitan_lite.fault_tolerance.supervision.restart_policy import (
    Failure,
    GiveUp,
    RestartAfter,
    RestartPolicy,
)

_MAX_LINE_CHARS = 300
_STOPPED_BY_OTHERS = "saved and left, because a process other than the launcher asked it to stop"
_REPLACEMENT_S = 15.0
"""Time in which all ranks of an agent have left a generation; hangs are detected again after it."""
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
    RESTARTING = "restarting"
    RESIZING = "resizing"
    """Its processes end, and others start."""
    LEAVING = "leaving"
    FINISHED = "finished"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


_OVER = {ReplicaState.FINISHED, ReplicaState.STOPPED, ReplicaState.GIVEN_UP}
_RUNNING = {ReplicaState.STARTING, ReplicaState.TRAINING, ReplicaState.HEALING}


class ReplicaProcess:
    """Replica, from its first generation to its end."""

    def __init__(
        self,
        number: int,
        start: Callable[[Path], WorkerGroup],
        *,
        folder: Path,
        metrics: Path,
        policy: RestartPolicy,
        on_failure: Callable[["ReplicaProcess", int | None], None],
        report_event: Callable[[str], None],
        report_diagnosis: Callable[[Diagnosis], None],
    ) -> None:
        """`start` starts a generation that logs into the given folder, a new one in `folder`;
        `metrics` is the metrics.jsonl of this replica. `on_failure` is called with the rank that
        failed, if it was one, as soon as a generation has failed, while its processes are being
        killed, or a rank has died that is replaced. `report_event` reports events to the user,
        `report_diagnosis` which process is at fault."""
        self.number = number
        self.state = ReplicaState.WAITING
        self.last_event = ""
        self.num_restarts = 0
        self.progress: ReplicaProgress | None = None
        self.given_up: GiveUp | None = None
        self.was_killed = False
        """Whether it exceeded the time limit of a stop request."""
        self._start_group, self._folder, self._metrics = start, folder, metrics
        self._policy = policy
        self._on_failure, self._report_event = on_failure, report_event
        self._report_diagnosis = report_diagnosis
        self.leader_log: Path | None = None
        """Log of rank 0 of the newest generation."""
        self.rank_pids: Mapping[int, int] = {}
        """Process ids of the living ranks, by rank."""
        self._group: WorkerGroup | None = None
        self._hang_monitor: HangMonitor | None = None
        self._is_stopping = self._is_resizing = self._is_failure_reported = False
        self._restart_at_s = self._read_at_s = self._check_hangs_at_s = 0.0
        self._examine_until_s = math.inf
        """When a failed generation is killed at the latest; infinite if that is done."""
        self._failed_at_ns = 0
        self._asked: set[int] = set()
        """Ranks that write their flight records after the failure."""

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
        """Whether no process of it runs, so that it can be restarted with another number of
        ranks."""
        return self._group is None and (self.is_over or self.state is ReplicaState.RESIZING)

    @property
    def is_running(self) -> bool:
        """Whether its ranks run, as far as known."""
        return self.state in _RUNNING

    @property
    def is_training(self) -> bool:
        """Whether it trains, or is about to with the state of another replica."""
        return self.state in (ReplicaState.TRAINING, ReplicaState.HEALING)

    @property
    def has_agent(self) -> bool:
        """Whether its ranks have an agent, which can resize it in its processes."""
        return self._group is not None and self._group.replaces_ranks

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that are readable when `poll` has work to do."""
        return [] if self._group is None else self._group.descriptors

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks' parent and of a running hang diagnosis."""
        pids = (process.pid for process in (self._group, self._hang_monitor) if process is not None)
        return [pid for pid in pids if pid is not None]

    def restarts_in_s(self, now_s: float) -> float:
        """Return the seconds until the next generation; 0 if none is scheduled."""
        return (
            max(0.0, self._restart_at_s - now_s) if self.state is ReplicaState.RESTARTING else 0.0
        )

    def start_generation(self) -> None:
        """Start a generation."""
        self._is_resizing = self._is_failure_reported = False
        self._check_hangs_at_s = 0.0
        folder = _next_folder(self._folder)
        self._policy.started()
        self._group = self._start_group(folder)
        self._hang_monitor = HangMonitor(self._group)
        self.leader_log = self._group.leader_log
        self.progress = ReplicaProgress(self._metrics, self._group.leader_log)
        self.state = ReplicaState.STARTING
        self._report(f"started, logs in {self._group.folder}")

    def poll(self, now_s: float) -> None:
        """Check the processes and files of the generation, and act on changes."""
        if self.state is ReplicaState.RESTARTING and now_s >= self._restart_at_s:
            self.num_restarts += 1
            self.start_generation()
        group = self._group
        if group is None:
            return
        group.poll()
        self._show_rank_pids({} if group.has_ended else group.rank_pids())
        if self.state in _RUNNING:
            for lost in group.take_lost_ranks():
                self._on_failure(self, lost.rank)
                # Without flight records: each world of an agent numbers its collectives anew, and
                # no other rank was asked for its own.
                self._diagnose(lost, {})
                self._report(f"{lost.description}; it is replaced, the others keep running")
            if group.has_failed:
                self._handle_failure(group, now_s)
            elif now_s >= self._read_at_s:
                self._read_progress(now_s)
                self._check_for_hang(group, now_s)
        elif (
            self.state is ReplicaState.RESIZING
            and group.has_failed
            and not self._is_failure_reported
        ):
            # Without this rank's part, the other ranks cannot complete their save.
            self._is_failure_reported = True
            group.kill()
            self._on_failure(self, None)
        if group.has_ended or now_s >= self._examine_until_s or self._is_examined(group):
            self._end_examination(group)
        if group.has_ended:
            self._group = None
            self._close_hang_monitor()
            group.close()
            self._handle_exit(group, now_s)

    def stop(self) -> None:
        """Request that the replica saves and leaves."""
        self._is_stopping = True
        if self._group is None:
            if not self.is_over:
                self.state = ReplicaState.STOPPED
        elif self.state is ReplicaState.RESIZING:
            self.state = ReplicaState.LEAVING
        elif self.state in _RUNNING:
            self.state = ReplicaState.LEAVING
            self._group.terminate()

    def resize(self) -> None:
        """Request that the replica saves and leaves, and then waits for `start_generation`."""
        self._is_resizing = True
        if self.is_over or self.state is ReplicaState.ENDING:
            return
        if self._group is not None:
            self._group.terminate()
        self.state = ReplicaState.RESIZING

    def resize_in_place(self, request: ResizeRequest) -> None:
        """Request that the agent resizes the replica in its processes. Raises OSError."""
        send_request(self._metrics.parent, request)

    def resize_answer(self, request: ResizeRequest) -> ResizeAnswer | None:
        """Return the agent's newest answer to `request`; None if there is none yet."""
        return read_answer(self._metrics.parent, request)

    def permit(self, request: ResizeRequest, permission: Permission, now_s: float) -> None:
        """Give the agent a permission for `request`. Raises OSError."""
        if permission is Permission.LEAVE:
            # Ranks that leave, and those that wait for others, make no progress.
            self._check_hangs_at_s = math.inf
        elif permission is Permission.START and self._group is not None:
            self._watch_again_later(self._group, now_s)
        permit(self._metrics.parent, request, permission)

    def kill(self) -> None:
        """Kill its processes."""
        if self._group is not None:
            if self.state is ReplicaState.LEAVING and not self.was_killed:
                self.was_killed = True
                self._report("killed before it had left")
            self._group.kill()

    def _check_for_hang(self, group: WorkerGroup, now_s: float) -> None:
        if now_s < self._check_hangs_at_s:
            return
        assert self._hang_monitor is not None
        was_looked_into = self._hang_monitor.pid is not None
        hang = self._hang_monitor.poll(now_s)
        if hang is not None:
            group.end_hang(hang)
            if not group.has_failed:
                self._report(hang.description)
                self._diagnose(hang, {})
                # The heartbeats of the others are as late, until they have left their training.
                self._watch_again_later(group, now_s)
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
        return self._folder / f"rank_{rank}.pid"

    def _watch_again_later(self, group: WorkerGroup, now_s: float) -> None:
        """Look for hangs again once all ranks are in another training."""
        self._close_hang_monitor()
        self._hang_monitor = HangMonitor(group)
        self._check_hangs_at_s = now_s + _REPLACEMENT_S

    def _close_hang_monitor(self) -> None:
        if self._hang_monitor is not None:
            self._hang_monitor.close()
            self._hang_monitor = None

    def _handle_failure(self, group: WorkerGroup, now_s: float) -> None:
        self._close_hang_monitor()
        self.state = ReplicaState.ENDING
        failure = group.failure()
        self._examine_until_s, self._failed_at_ns = now_s, time.time_ns()
        if failure.has_error and not (failure.names_itself or failure.status == TRANSIENT):
            # Its error may be the effect of another rank's. A stopped rank does not answer.
            self._examine_until_s += _EXAMINE_S
            self._asked = {
                rank
                for rank, pid in group.rank_pids().items()
                if state_of(pid) != STOPPED and request_flight_record(pid)
            }
        self._on_failure(self, failure.rank)
        self._report(f"failed, {failure.description}")
        if failure.signature and (lines := last_lines(failure.log, 1)):
            line = "".join(filter(str.isprintable, lines[0]))[:_MAX_LINE_CHARS]
            self._report_event(f"replica {self.number}: {failure.log} ends with: {line}")

    def _is_examined(self, group: WorkerGroup) -> bool:
        """Return whether all ranks that live have written what the failure is compared with."""
        return self._examine_until_s < math.inf and all(
            has_newer_flight_record(group.folder, rank, self._failed_at_ns)
            for rank in self._asked & group.rank_pids().keys()
        )

    def _end_examination(self, group: WorkerGroup) -> None:
        """Diagnose a failed generation, and kill what is left of it: the other ranks of the replica
        hang without the failed one, and block all other replicas."""
        if self._examine_until_s < math.inf:
            self._examine_until_s = math.inf
            # Calls are compared by their numbers, so that an older record of this generation does
            # no harm: a rank writes one when an error ends it.
            is_comparable = not group.replaces_ranks
            ranks = range(group.num_ranks) if is_comparable else ()
            self._diagnose(group.failure(), newer_flight_records(group.folder, ranks, 0))
            group.kill()

    def _diagnose(self, failure: Failure, records: Mapping[int, FlightRecord]) -> None:
        lines = last_lines(failure.log, LOG_LINES)
        diagnosis = diagnose_failure(failure, self.number, lines, records)
        if diagnosis is not None:
            self._report_diagnosis(diagnosis)

    def _read_progress(self, now_s: float) -> None:
        self._read_at_s = now_s + _READ_INTERVAL_S
        assert self.progress is not None
        self.progress.update()
        if self.progress.is_healing:
            before, self.state = self.state, ReplicaState.HEALING
        elif self.progress.last_step is not None:
            before, self.state = self.state, ReplicaState.TRAINING
            self._policy.made_progress(now_s)
        else:
            return
        if before is not self.state:
            self._report(f"{self.state.value}{self._at_step()}")

    def _at_step(self) -> str:
        record = None if self.progress is None else self.progress.last_step
        return "" if record is None else f" at step {record['step']}"

    def _handle_exit(self, group: WorkerGroup, now_s: float) -> None:
        """Handle the end of a generation, after all its processes have exited."""
        if self.progress is not None:
            # It may have taken more steps since it was asked to leave.
            self.progress.update()
        if self._is_stopping:
            self.state = ReplicaState.STOPPED
            self._report(f"left{self._at_step()}")
        elif self.state is ReplicaState.RESIZING:
            self._report("left to resize")
        elif self.state is ReplicaState.ENDING or group.stopped_early:
            if self.state is ReplicaState.ENDING:
                failure = group.failure()
            else:
                # The launcher and its user still want this replica.
                failure = Failure(_STOPPED_BY_OTHERS, "", group.leader_log)
                self._report(failure.description)
            decision = self._policy.failed(failure, now_s)
            if isinstance(decision, RestartAfter) and self._is_resizing:
                self.state = ReplicaState.RESIZING
            elif isinstance(decision, RestartAfter):
                self.state, self._restart_at_s = ReplicaState.RESTARTING, now_s + decision.delay_s
                self._report(f"restarts in {decision.delay_s:g} s")
            else:
                self.state, self.given_up = ReplicaState.GIVEN_UP, decision
                self._report(f"given up: {decision.reason}")
        else:
            self.state = ReplicaState.FINISHED
            self._report(f"finished{self._at_step()}")

    def _report(self, event: str) -> None:
        self.last_event = f"{time.strftime('%H:%M:%S')} {event}"
        self._report_event(f"replica {self.number}: {event}")


def _next_folder(folder: Path) -> Path:
    """Return the log folder of the next generation. Folders of an earlier launch are kept."""
    endings = (path.name.rpartition("_")[2] for path in folder.glob("generation_*"))
    taken = (int(ending) for ending in endings if ending.isdigit())
    return folder / f"generation_{max(taken, default=-1) + 1:02d}"
