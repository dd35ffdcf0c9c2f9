"""One replica: its attempts, one after the other. Layer: above group, policy and progress.

Invariant: an attempt begins only once all processes of the one before are gone.
"""

import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from torchtitan_lite.launcher.group import Group
from torchtitan_lite.launcher.hang_watch import HangWatch
from torchtitan_lite.launcher.log_lines import last_lines
from torchtitan_lite.launcher.policy import GiveUp, Restart, RestartPolicy
from torchtitan_lite.launcher.progress import Progress

_LONGEST_LINE = 300
_READING_S = 0.25
"""Between two looks at the files of a replica."""


class State(Enum):
    """Where a replica stands. The values are shown to people."""

    WAITING = "waiting"
    STARTING = "starting"
    TRAINING = "training"
    HEALING = "healing"
    ENDING = "ending"
    RESTARTING = "restarting"
    REFORMING = "re-forming"
    LEAVING = "leaving"
    FINISHED = "finished"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


_OVER = {State.FINISHED, State.STOPPED, State.GIVEN_UP}
_RUNNING = {State.STARTING, State.TRAINING, State.HEALING}


class Replica:
    """A replica, from its first attempt to its end."""

    def __init__(
        self,
        number: int,
        start: Callable[[Path], Group],
        *,
        folder: Path,
        metrics: Path,
        policy: RestartPolicy,
        on_failure: Callable[["Replica"], None],
        say: Callable[[str], None],
    ) -> None:
        """`start` starts an attempt that logs into the folder it is given, a new one in `folder`;
        `metrics` is the file metrics.jsonl of this replica. `on_failure` is called as soon as an
        attempt has failed and is being ended. `say` tells people what happens."""
        self.number = number
        self.state = State.WAITING
        self.last_event = ""
        self.num_restarts = 0
        self.progress: Progress | None = None
        self.given_up: GiveUp | None = None
        self.was_killed = False
        """Whether it was asked to leave and did not in time."""
        self._start, self._folder, self._metrics = start, folder, metrics
        self._policy = policy
        self._on_failure, self._tell = on_failure, say
        self.leader_log: Path | None = None
        """What rank 0 of the newest attempt prints."""
        self._group: Group | None = None
        self._hangs: HangWatch | None = None
        self._is_stopping = self._is_reforming = self._is_failure_told = False
        self._restart_at_s = self._read_at_s = 0.0

    @property
    def name(self) -> str:
        """By which the lighthouse knows it."""
        return f"replica_{self.number:05d}"

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs, or will."""
        return self.state in _OVER

    @property
    def has_left(self) -> bool:
        """Whether nothing of it runs, so that it may begin again in another form."""
        return self._group is None and (self.is_over or self.state is State.REFORMING)

    @property
    def failing_rank(self) -> int | None:
        """The rank whose failure is being dealt with, where it was one."""
        if self._group is None or self.state is not State.ENDING:
            return None
        return self._group.failure().rank

    @property
    def descriptors(self) -> list[int]:
        """Readable when there is something to look at."""
        return [] if self._group is None else self._group.descriptors

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started for it: torchrun, and who looks into a hang."""
        found = (one.pid for one in (self._group, self._hangs) if one is not None)
        return [pid for pid in found if pid is not None]

    def restarts_in_s(self, now_s: float) -> float:
        """Seconds until its next attempt; 0 when none is waited for."""
        return max(0.0, self._restart_at_s - now_s) if self.state is State.RESTARTING else 0.0

    def begin(self) -> None:
        """Start an attempt."""
        self._is_reforming = self._is_failure_told = False
        folder = _next_folder(self._folder)
        self._policy.started()
        self._group = self._start(folder)
        self._hangs = HangWatch(self._group)
        self.leader_log = self._group.leader_log
        self.progress = Progress(self._metrics, self._group.leader_log)
        self.state = State.STARTING
        self._say(f"started, logs in {folder}")

    def look(self, now_s: float) -> None:
        """Take note of what has happened, and do what follows from it."""
        if self.state is State.RESTARTING and now_s >= self._restart_at_s:
            self.num_restarts += 1
            self.begin()
        group = self._group
        if group is None:
            return
        group.look()
        if self.state in _RUNNING:
            if group.has_failed:
                self._end_failed(group)
            elif now_s >= self._read_at_s:
                self._read(now_s)
                self._look_for_hangs(group, now_s)
        elif self.state is State.REFORMING and group.has_failed and not self._is_failure_told:
            # What one rank has not saved, the others cannot.
            self._is_failure_told = True
            group.kill()
            self._on_failure(self)
        if group.has_ended:
            self._group = None
            self._close_hangs()
            group.close()
            self._settle(group, now_s)

    def stop(self) -> None:
        """Ask it to save and leave."""
        self._is_stopping = True
        if self._group is None:
            if not self.is_over:
                self.state = State.STOPPED
        elif self.state is State.REFORMING:
            self.state = State.LEAVING
        elif self.state in _RUNNING:
            self.state = State.LEAVING
            self._group.terminate()

    def reform(self) -> None:
        """Ask it to save and leave, and to wait for `begin`."""
        self._is_reforming = True
        if self.is_over or self.state is State.ENDING:
            return
        if self._group is not None:
            self._group.terminate()
        self.state = State.REFORMING

    def kill(self) -> None:
        """End it at once."""
        if self._group is not None:
            if self.state is State.LEAVING and not self.was_killed:
                self.was_killed = True
                self._say("killed before it had left")
            self._group.kill()

    def _look_for_hangs(self, group: Group, now_s: float) -> None:
        assert self._hangs is not None
        was_looked_into = self._hangs.pid is not None
        hang = self._hangs.look(now_s)
        if hang is not None:
            group.hangs(hang)
        elif was_looked_into and self._hangs.pid is None:
            self._say("goes on: it was only slow")
        elif not was_looked_into and self._hangs.pid is not None:
            self._say("makes no progress, and is looked into")

    def _close_hangs(self) -> None:
        if self._hangs is not None:
            self._hangs.close()
            self._hangs = None

    def _end_failed(self, group: Group) -> None:
        # Neighbours of a dead rank hang, and hold up all other replicas.
        group.kill()
        self._close_hangs()
        self.state = State.ENDING
        self._on_failure(self)
        failure = group.failure()
        self._say(f"failed, {failure.what}")
        if failure.cause and (lines := last_lines(failure.log, 1)):
            line = "".join(filter(str.isprintable, lines[0]))[:_LONGEST_LINE]
            self._tell(f"replica {self.number}: {failure.log} ends with: {line}")

    def _read(self, now_s: float) -> None:
        self._read_at_s = now_s + _READING_S
        assert self.progress is not None
        self.progress.look()
        if self.progress.is_healing:
            before, self.state = self.state, State.HEALING
        elif self.progress.record is not None:
            before, self.state = self.state, State.TRAINING
            self._policy.worked(now_s)
        else:
            return
        if before is not self.state:
            self._say(f"{self.state.value}{self._at_step()}")

    def _at_step(self) -> str:
        record = None if self.progress is None else self.progress.record
        return "" if record is None else f" at step {record['step']}"

    def _settle(self, group: Group, now_s: float) -> None:
        """All of an attempt's processes are gone."""
        if self._is_stopping:
            self.state = State.STOPPED
            self._say("left")
        elif self.state is State.REFORMING:
            self._say("left, to re-form")
        elif self.state is State.ENDING:
            decision = self._policy.failed(group.failure(), now_s)
            if isinstance(decision, Restart) and self._is_reforming:
                self.state = State.REFORMING
            elif isinstance(decision, Restart):
                self.state, self._restart_at_s = State.RESTARTING, now_s + decision.delay_s
                self._say(f"restarts in {decision.delay_s:g} s")
            else:
                self.state, self.given_up = State.GIVEN_UP, decision
                self._say(f"given up: {decision.reason}")
        else:
            self._read(now_s)
            self.state = State.FINISHED
            self._say("finished")

    def _say(self, event: str) -> None:
        self.last_event = f"{time.strftime('%H:%M:%S')} {event}"
        self._tell(f"replica {self.number}: {event}")


def _next_folder(folder: Path) -> Path:
    """Where the next attempt logs: an earlier run may have left some, which stay as they are."""
    endings = (path.name.rpartition("_")[2] for path in folder.glob("attempt_*"))
    taken = (int(ending) for ending in endings if ending.isdigit())
    return folder / f"attempt_{max(taken, default=-1) + 1:02d}"
