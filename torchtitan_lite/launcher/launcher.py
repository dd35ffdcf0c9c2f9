"""The loop that starts everything, looks at it, and ends it. Layer: above all of launcher/ but
its command.

One thread does it all: forks must come from it, and each look takes far less than a millisecond.
"""

import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType

from torchtitan_lite.launcher.group import Group
from torchtitan_lite.launcher.lighthouse_process import LighthouseProcess
from torchtitan_lite.launcher.log_lines import last_lines
from torchtitan_lite.launcher.messenger import Messenger
from torchtitan_lite.launcher.orphans import Orphans
from torchtitan_lite.launcher.parent_death import adopt_orphans
from torchtitan_lite.launcher.plan import Plan
from torchtitan_lite.launcher.policy import GiveUp, RestartPolicy
from torchtitan_lite.launcher.reforming import Reforming
from torchtitan_lite.launcher.replica import Replica, State
from torchtitan_lite.launcher.sizes import Sizes
from torchtitan_lite.launcher.slots import SlotsFile
from torchtitan_lite.launcher.supervised import ATTEMPT
from torchtitan_lite.launcher.view import View
from torchtitan_lite.outputs import SAMPLE

_LOOK_S = 0.05
_SHOWN_LINES = 25
_END_LINES = 200
"""More than a replica prints after its last step."""
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Launcher:
    """Replicas and their lighthouse, from the start to the end of all."""

    def __init__(self, plan: Plan, view: View) -> None:
        self._plan, self._view = plan, view
        self._environment = plan.first_environment()
        self._lighthouse = LighthouseProcess(
            plan.lighthouse_command,
            self._environment,
            host=plan.host,
            log=plan.log_dir / "lighthouse.log",
            max_restarts=plan.max_restarts,
            say=view.say,
        )
        self._messenger: Messenger | None = None
        if plan.messenger_command is not None:
            self._messenger = Messenger(
                plan.messenger_command, self._environment, plan.log_dir / "messenger.log"
            )
        self._reforming = Reforming(
            Sizes(plan.ranks, plan.num_replicas, trial_s=plan.regrow_after_s),
            SlotsFile(plan.slots_file, view.say),
            grace_s=plan.grace_s,
            say=view.say,
        )
        self._replicas = [self._replica(number) for number in range(plan.num_replicas)]
        self._orphans = Orphans()
        self._signals: list[int] = []
        self._heard = 0
        self._begun = False
        self._deadline_s: float | None = None

    def run(self) -> int:
        """Launch, and return the exit status once nothing is left: 0 when all replicas finished or
        left as they were asked to. Main thread only. Raises OSError when nothing can be started."""
        adopt_orphans()
        with self._listening():
            try:
                self._lighthouse.start()
                while not all(one.is_over for one in self._replicas):
                    self._wait()
                    self._look()
                self._kill()
                self._let_orphans_end()
            finally:
                self._kill()
                self._view.close()
        return self._status()

    def failures(self) -> list[str]:
        """What to tell of those that were given up, for people: a text each."""
        ends = [(f"Replica {one.number}", one.given_up) for one in self._replicas]
        ends.append(("The lighthouse", self._lighthouse.given_up))
        return [_told(who, end) for who, end in ends if end is not None]

    @property
    def finished_steps(self) -> int | None:
        """The number of steps of the run, if all replicas have finished it."""
        if any(one.state is not State.FINISHED for one in self._replicas):
            return None
        found = (one.progress.total_steps for one in self._replicas if one.progress is not None)
        return next((steps for steps in found if steps is not None), None)

    def sample(self) -> list[str]:
        """The text that a finished replica generated at its end; empty if there is none."""
        for one in self._replicas:
            lines = [] if one.leader_log is None else last_lines(one.leader_log, _END_LINES)
            if SAMPLE in lines:
                lines = lines[lines.index(SAMPLE) :]
                ends = (k for k, line in enumerate(lines) if line.startswith("Outputs "))
                return [*lines[: next(ends, len(lines))], ""]
        return []

    def _replica(self, number: int) -> Replica:
        plan, attempts = self._plan, count()

        def start(folder: Path) -> Group:
            own = {
                "TORCHFT_LIGHTHOUSE": f"http://{self._lighthouse.address}",
                ATTEMPT: str(next(attempts)),
            }
            environment = {**self._environment, **own}
            num_ranks = self._reforming.num_ranks
            return Group(plan.group_command(number, num_ranks), environment, num_ranks, folder)

        return Replica(
            number,
            start,
            folder=plan.logs(number),
            metrics=plan.metrics(number),
            policy=RestartPolicy(plan.max_restarts, max_delay_s=plan.max_restart_delay_s),
            on_failure=self._on_failure,
            say=self._view.say,
        )

    def _on_failure(self, replica: Replica) -> None:
        if replica.failing_rank is not None:
            self._reforming.died(replica.number, replica.failing_rank, time.monotonic())
        address = self._lighthouse.address
        if self._messenger is None or address is None:
            return
        try:
            self._messenger.tell(address, replica.name)
        except OSError as error:
            # The lighthouse finds out by itself, only later.
            self._view.say(f"replica {replica.number}: the lighthouse was not told: {error}")

    def _wait(self) -> None:
        poll = select.poll()
        for source in (self._lighthouse, *self._replicas):
            for descriptor in source.descriptors:
                poll.register(descriptor, select.POLLIN)
        poll.poll(_LOOK_S * 1000)

    def _look(self) -> None:
        now_s = time.monotonic()
        self._heed_signals(now_s)
        for replica in self._replicas:
            replica.look(now_s)
        self._lighthouse.look(now_s)
        if self._lighthouse.is_listening and not self._begun and self._deadline_s is None:
            self._begun = True
            if self._messenger is not None and self._lighthouse.address is not None:
                self._messenger.start(self._lighthouse.address)
            self._reforming.begin(now_s)
            for replica in self._replicas:
                replica.begin()
        elif self._begun and self._deadline_s is None:
            self._reforming.look(self._replicas, now_s)
        self._look_at_orphans(now_s)
        ends = [one.given_up for one in (self._lighthouse, *self._replicas)]
        ends_all = any(end is not None and not end.spares_others for end in ends)
        if ends_all and self._deadline_s is None:
            self._stop(now_s)
        if self._deadline_s is not None and now_s >= self._deadline_s:
            for replica in self._replicas:
                replica.kill()
        self._view.show(self._replicas, self._lighthouse)

    def _heed_signals(self, now_s: float) -> None:
        for number in self._signals[self._heard :]:
            self._heard += 1
            name = signal.Signals(number).name
            if self._deadline_s is None:
                self._view.say(f"{name}: replicas save and leave, {self._plan.grace_s:g} s at most")
                self._stop(now_s)
            elif number == signal.SIGINT:
                self._view.say(f"{name} again: everything is killed")
                self._deadline_s = now_s

    def _stop(self, now_s: float) -> None:
        self._deadline_s = now_s + self._plan.grace_s
        for replica in self._replicas:
            replica.stop()

    def _look_at_orphans(self, now_s: float) -> None:
        started = {pid for replica in self._replicas for pid in replica.pids}
        for one in (self._lighthouse, self._messenger):
            if one is not None and one.pid is not None:
                started.add(one.pid)
        self._orphans.look(started, now_s)

    def _let_orphans_end(self) -> None:
        """Wait for writers that make the last snapshot of a killed trainer durable: the end of the
        launcher may be the end of its container."""
        deadline_s = time.monotonic() + self._plan.grace_s
        said = False
        while True:
            now_s = time.monotonic()
            self._look_at_orphans(now_s)
            if not self._orphans.count:
                return
            if now_s >= deadline_s or signal.SIGINT in self._signals[self._heard :]:
                self._view.say("writers of checkpoints are still busy, and are left to themselves")
                return
            if self._orphans.has_writer and not said:
                self._view.say("waiting for writers of checkpoints")
                said = True
            time.sleep(_LOOK_S)

    def _kill(self) -> None:
        for replica in self._replicas:
            replica.kill()
        self._lighthouse.kill()
        if self._messenger is not None:
            self._messenger.kill()

    def _status(self) -> int:
        well = all(one.given_up is None and not one.was_killed for one in self._replicas)
        return 0 if well and self._lighthouse.given_up is None else 1

    @contextmanager
    def _listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in _STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def _told(who: str, end: GiveUp) -> str:
    lines = last_lines(end.first.log, _SHOWN_LINES)
    shown = "\n".join(f"    {line}" for line in lines) or "    (it is empty)"
    return f"{who} is given up: {end.reason}. {end.first.what}. {end.first.log} ends so:\n{shown}"
