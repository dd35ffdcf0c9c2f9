"""Event loop that starts, monitors and stops the lighthouse and the replicas.

It runs on one thread: processes must be forked from the main thread, and one iteration takes far
less than a millisecond.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from torchtitan_lite.core.diagnosis import NOTIFIER, Cause, Diagnosis
from torchtitan_lite.core.outputs import SAMPLE
from torchtitan_lite.core.rank.processes import Subreaper, become_subreaper, wait_readable
from torchtitan_lite.core.rank.supervised import LAUNCHER_PID, LIGHTHOUSE
from torchtitan_lite.fault_tolerance.supervision.agent.member import Member
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import RankProcess
from torchtitan_lite.fault_tolerance.supervision.coordinator.link import LocalLink
from torchtitan_lite.fault_tolerance.supervision.coordinator.replica_coordinator import RunRules
from torchtitan_lite.fault_tolerance.supervision.coordinator.run_coordinator import RunCoordinator
from torchtitan_lite.fault_tolerance.supervision.failures.link_monitor import LinkMonitor
from torchtitan_lite.fault_tolerance.supervision.launcher.departures import DepartureNotifier
from torchtitan_lite.fault_tolerance.supervision.launcher.lighthouse_process import (
    LighthouseProcess,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import LaunchPlan
from torchtitan_lite.fault_tolerance.supervision.launcher.replica import (
    Replica,
    ReplicaState,
    process_log,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.resize import (
    ResizePolicy,
    Resizer,
    SlotsFile,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.status_view import StatusView
from torchtitan_lite.fault_tolerance.supervision.logs import last_lines, open_log
from torchtitan_lite.fault_tolerance.supervision.resize_request import RequestInbox
from torchtitan_lite.fault_tolerance.supervision.restart_policy import (
    GiveUp,
    RestartPolicy,
)

_POLL_S = 0.02
_FIRST_DELAY_S = 0.1
"""Delay of the first restart of a replica."""
_FAILURE_LINES = 25
_END_LINES = 200
"""Upper bound on the lines that a replica prints after its last step."""
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Launcher:
    """The lighthouse and the replicas of a run."""

    def __init__(self, plan: LaunchPlan, view: StatusView) -> None:
        self._plan, self._view = plan, view
        self._environment = plan.base_environment()
        self._lighthouse = LighthouseProcess(
            plan.lighthouse_command,
            self._environment,
            host=plan.host,
            log=plan.log_dir / "lighthouse.log",
            max_restarts=plan.max_restarts,
            report_event=view.report_event,
            report_diagnosis=view.report_diagnosis,
        )
        self._notifier: DepartureNotifier | None = None
        if plan.notifier_command is not None:
            self._notifier = DepartureNotifier(
                plan.notifier_command,
                self._environment,
                plan.log_dir / "departure_notifier.log",
                max_restarts=plan.max_restarts,
            )
        self._resizer = Resizer(
            ResizePolicy(plan.ranks, plan.num_replicas, regrow_after_s=plan.regrow_after_s),
            SlotsFile(plan.slots_file, view.report_event),
            RequestInbox(plan.dump_folder),
            refusal=plan.resize_refusal,
            check_command=plan.check_command,
            environment=self._environment,
            grace_s=plan.grace_s,
            report_event=view.report_event,
        )
        self._replicas = [self._replica(number) for number in range(plan.num_replicas)]
        self._policies = [
            RestartPolicy(
                plan.max_restarts,
                first_delay_s=_FIRST_DELAY_S,
                max_delay_s=plan.max_restart_delay_s,
            )
            for _ in self._replicas
        ]
        self._links = LinkMonitor()
        self._subreaper = Subreaper()
        self._signals: list[int] = []
        self._num_handled = 0
        self._has_started = False
        self._deadline_s: float | None = None

    def run(self) -> int:
        """Run until no process is left, and return the exit status: 0 if all replicas finished or
        left on request. Main thread only. Raises OSError if no process can be started."""
        become_subreaper()
        with self._handling_signals():
            try:
                self._lighthouse.start()
                while not all(replica.is_over for replica in self._replicas):
                    wait_readable(self._lighthouse.descriptors, _POLL_S)
                    self._poll()
                self._resizer.end("the run has ended")
                self._kill()
                self._wait_for_orphans()
            finally:
                self._kill()
                self._view.close()
                for replica in self._replicas:
                    replica.close()
        return self._status()

    def failures(self) -> list[str]:
        """Return a message for each replica that was given up, and for the lighthouse."""
        ends = [(f"Replica {replica.number}", replica.given_up) for replica in self._replicas]
        ends.append(("The lighthouse", self._lighthouse.given_up))
        return [_give_up_message(name, end) for name, end in ends if end is not None]

    @property
    def finished_steps(self) -> int | None:
        """Number of steps of the run, if all replicas have finished it."""
        if any(replica.state is not ReplicaState.FINISHED for replica in self._replicas):
            return None
        totals = (
            replica.progress.total_steps
            for replica in self._replicas
            if replica.progress is not None
        )
        return next((steps for steps in totals if steps is not None), None)

    def sample(self) -> list[str]:
        """Return the text that a finished replica generated at its end; empty if there is none."""
        for replica in self._replicas:
            lines = [] if replica.leader_log is None else last_lines(replica.leader_log, _END_LINES)
            if SAMPLE in lines:
                lines = lines[lines.index(SAMPLE) :]
                ends = (k for k, line in enumerate(lines) if line.startswith("Outputs "))
                return [*lines[: next(ends, len(lines))], ""]
        return []

    def _replica(self, number: int) -> Replica:
        plan = self._plan
        return Replica(
            number,
            # A resize may change their number, up to the largest.
            max_ranks=max(plan.ranks),
            folder=plan.log_folder(number),
            metrics=plan.metrics_file(number),
            environment={
                **self._environment,
                **plan.devices_of(number),
                LAUNCHER_PID: str(os.getpid()),
            },
            on_failure=self._on_failure,
            report_event=self._view.report_event,
            report_diagnosis=self._report_failure,
        )

    def _start_replicas(self) -> None:
        """Start all replicas that are not over, on the mesh of the resizer."""
        mesh, plan = self._resizer.mesh, self._plan
        rules = RunRules(policy=self._policies.__getitem__, is_local=True, outlives_stops=True)
        coordinator = RunCoordinator(time.monotonic(), rules)
        for replica in self._replicas:
            if replica.is_over:
                continue
            link = LocalLink(
                coordinator, mesh, replica=replica.number, num_replicas=plan.num_replicas
            )
            member = Member(
                partial(self._start_process, replica),
                mesh,
                plan.num_spares,
                link=link,
                inbox=self._resizer,
                requests=replica.requests,
                generation_environment=replica.generation_environment,
                may_end=replica.may_end,
                log=replica.log,
            )
            replica.start(member, partial(coordinator.restart_s, replica.number))

    def _start_process(self, replica: Replica) -> RankProcess:
        environment = {
            **replica.environment,
            LIGHTHOUSE: f"http://{self._lighthouse.address}",
        }
        with open_log(process_log(replica.log_folder)) as log:
            command = self._plan.process_command(replica.number)
            return RankProcess(command, environment, log.fileno())

    def _report_failure(self, diagnosis: Diagnosis) -> None:
        now_s, replica = time.monotonic(), diagnosis.replica
        if (
            diagnosis.cause is Cause.HANG
            and replica is not None
            and self._links.explains_hang(replica, now_s)
        ):
            # All ranks wait for the link, which has been reported.
            return
        self._view.report_diagnosis(diagnosis)

    def _on_failure(self, replica: Replica, rank: int | None) -> None:
        if rank is not None:
            self._resizer.record_failure(replica.number, rank, time.monotonic())
        address = self._lighthouse.address
        if self._notifier is None or address is None:
            return
        try:
            self._notifier.notify(address, replica.name)
        except OSError as error:
            # Otherwise the lighthouse detects the missing heartbeats, a few seconds later.
            self._view.report_event(
                f"replica {replica.number}: the lighthouse was not notified: {error}"
            )

    def _poll(self) -> None:
        now_s = time.monotonic()
        self._handle_signals(now_s)
        ranks = {
            (replica.number, rank): pid
            for replica in self._replicas
            for rank, pid in replica.rank_pids.items()
            if replica.is_training
        }
        is_symmetric = not self._plan.is_pipelined(self._resizer.mesh) and all(
            # Healing sends the state of one replica to another.
            replica.is_over or replica.state is ReplicaState.TRAINING
            for replica in self._replicas
        )
        for diagnosis in self._links.poll(ranks, now_s, is_symmetric=is_symmetric):
            self._view.report_diagnosis(diagnosis)
        for replica in self._replicas:
            replica.poll(now_s)
        self._lighthouse.poll(now_s)
        self._poll_notifier(now_s)
        if self._lighthouse.is_listening and not self._has_started and self._deadline_s is None:
            self._has_started = True
            if self._notifier is not None and self._lighthouse.address is not None:
                self._notifier.start(self._lighthouse.address)
            self._resizer.choose_initial(now_s)
            self._start_replicas()
        elif (
            self._has_started
            and self._deadline_s is None
            and self._resizer.poll(self._replicas, now_s)
        ):
            self._start_replicas()
        self._reap_orphans(now_s)
        ends = [process.given_up for process in (self._lighthouse, *self._replicas)]
        ends_all = any(end is not None and not end.others_continue for end in ends)
        if ends_all and self._deadline_s is None:
            self._stop(now_s)
        if self._deadline_s is not None and now_s >= self._deadline_s:
            for replica in self._replicas:
                replica.kill()
        self._view.update(self._replicas, self._lighthouse)

    def _poll_notifier(self, now_s: float) -> None:
        notifier, address = self._notifier, self._lighthouse.address
        if notifier is None or address is None or self._deadline_s is not None:
            return
        if (text := notifier.poll(address, now_s)) is not None:
            diagnosis = Diagnosis(cause=Cause.PROCESS_DIED, text=text, process=NOTIFIER)
            self._view.report_diagnosis(diagnosis)

    def _handle_signals(self, now_s: float) -> None:
        for number in self._signals[self._num_handled :]:
            self._num_handled += 1
            name = signal.Signals(number).name
            if self._deadline_s is None:
                self._view.report_event(
                    f"{name}: replicas save and leave within {self._plan.grace_s:g} s"
                )
                self._stop(now_s)
            elif number == signal.SIGINT:
                self._view.report_event(f"{name} again: killing everything")
                self._deadline_s = now_s

    def _stop(self, now_s: float) -> None:
        self._deadline_s = now_s + self._plan.grace_s
        self._resizer.end("the run was asked to stop")
        for replica in self._replicas:
            replica.stop()

    def _reap_orphans(self, now_s: float) -> None:
        started = {pid for replica in self._replicas for pid in replica.pids}
        started.update(self._resizer.pids)
        for process in (self._lighthouse, self._notifier):
            if process is not None and process.pid is not None:
                started.add(process.pid)
        self._subreaper.reap(started, now_s)

    def _wait_for_orphans(self) -> None:
        """Wait for writers that save the last snapshot of a killed trainer: the end of the launcher
        may be the end of its container."""
        deadline_s = time.monotonic() + self._plan.grace_s
        has_reported = False
        while True:
            now_s = time.monotonic()
            self._reap_orphans(now_s)
            if not self._subreaper.num_orphans:
                return
            if now_s >= deadline_s or signal.SIGINT in self._signals[self._num_handled :]:
                self._view.report_event(
                    "checkpoint writers are still busy: they continue without the launcher"
                )
                return
            if self._subreaper.has_writer and not has_reported:
                self._view.report_event("waiting for checkpoint writers")
                has_reported = True
            time.sleep(_POLL_S)

    def _kill(self) -> None:
        for replica in self._replicas:
            replica.kill()
        while any(replica.pids for replica in self._replicas):
            for replica in self._replicas:
                replica.poll(time.monotonic())
            time.sleep(_POLL_S)
        self._lighthouse.kill()
        if self._notifier is not None:
            self._notifier.kill()

    def _status(self) -> int:
        well = all(
            replica.given_up is None and not replica.was_killed for replica in self._replicas
        )
        return 0 if well and self._lighthouse.given_up is None else 1

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in _STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def _give_up_message(name: str, end: GiveUp) -> str:
    failure = end.first_failure
    lines = last_lines(failure.log, _FAILURE_LINES)
    shown = "\n".join(f"    {line}" for line in lines) or "    (it is empty)"
    # The reason of a replica has it.
    parts = [end.reason] if failure.description in end.reason else [end.reason, failure.description]
    reason = ". ".join(part.rstrip(".") for part in parts)
    return f"{name} is given up: {reason}. {failure.log} ends with:\n{shown}"
