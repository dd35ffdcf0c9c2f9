"""The member's handle of one process, which trains as a rank or is a spare."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from enum import Enum

from torchtitan_lite.core.rank.processes import ExitStatus, signal_process
from torchtitan_lite.core.rank.supervised import RANK_CHANNEL
from torchtitan_lite.fault_tolerance.supervision.agent.channel import AgentChannel


class RankState(Enum):
    """State of a process, as it has reported it."""

    STARTING = "starting"
    STANDBY = "standby"
    TRAINING = "training"
    FAILED = "failed"
    """Its training raised an exception and unwinds; `STANDBY` or `ENDED` follows."""
    ENDED = "ended"
    """Its training ended; it waits for the others."""
    EXITED = "exited"


def rank_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a process that trains with `arguments` of `train`."""
    return [sys.executable, "-m", "torchtitan_lite", "train", *arguments]


class RankProcess:
    """A process of the member."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> None:
        """Start `command`, which serves a member, see `worker.serve`. It prints into the file
        descriptor `output`, or where this process does. Raises OSError."""
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                command,
                env={**environment, RANK_CHANNEL: str(there.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(there.fileno(),),
                # Ctrl-C is forwarded by the agent, once.
                start_new_session=True,
            )
        self._channel = AgentChannel(here)
        self._lease_until_s: float | None = None
        self.state = RankState.STARTING
        self.status: ExitStatus | None = None
        """Exit status of the process, or of its ended training."""
        self.error = ""
        """Last line of the exception that it reported."""
        self.may_pass = False
        """Whether the cause of that exception may pass."""
        self.ends = False
        """Whether its training will end with that exception, so that `ENDED` follows."""
        self.end_reason = ""
        """Error with which its training ended."""
        self.may_restart = False
        """Whether the training may go on after that error if it is started again."""
        self.was_stopped = False
        """Whether its training ended before the last step, because a rank was asked to stop."""
        self.failed_at_s = 0.0
        """When it reported the exception (time.monotonic())."""
        self.has_progress = False
        """Whether it has committed a step as its present rank."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> None:
        """Read its messages and its exit status."""
        for message in self._channel.receive(wait=False):
            if "standby" in message:
                self.state = RankState.STANDBY
            elif "failed" in message:
                self.state, self.error = RankState.FAILED, str(message["failed"])
                self.may_pass, self.ends = bool(message["may_pass"]), bool(message["ends"])
                self.failed_at_s = time.monotonic()
            elif "ended" in message:
                self.state, self.status = RankState.ENDED, ExitStatus(int(message["ended"]))
                self.end_reason = str(message["reason"])
                self.was_stopped = bool(message["stopped"])
                self.may_restart = bool(message["may_restart"])
            elif "progress" in message:
                self.has_progress = True
        code = self._process.poll()
        if code is not None and self.state is not RankState.EXITED:
            self.state, self.status = RankState.EXITED, ExitStatus(code)
            self._channel.close()

    def start_training(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        listener: socket.socket | None = None,
    ) -> None:
        """Order a process on standby to train as the rank that `environment` describes, with
        `arguments` added to its own. `listener`: the socket at which rank 0 opens the store of the
        generation."""
        self.state, self.has_progress, self.error = RankState.TRAINING, False, ""
        self.status, self.end_reason, self.was_stopped = None, "", False
        if self._lease_until_s is not None:
            self._channel.send(lease=self._lease_until_s)
        # A process on standby reads its messages, and has received none but orders.
        descriptors = [] if listener is None else [listener.fileno()]
        self._channel.send(
            *descriptors,
            start=dict(environment),
            arguments=list(arguments),
            has_listener=listener is not None,
        )

    def allow_outputs(self) -> bool:
        """Let the process write what it has withheld, see `core.output_fence`. Returns whether the
        message was accepted: a process that does not read must not block the agent."""
        return self._channel.offer(outputs=True)

    def renew_lease(self, until_s: float) -> None:
        """Allow the process to train until then (`lease_clock_s`). Without a call, forever. A
        process that does not read must not block the agent: it misses renewals."""
        self._lease_until_s = until_s
        # On standby, its checkpoint writer may still work.
        if self.state in (RankState.TRAINING, RankState.FAILED, RankState.STANDBY):
            self._channel.offer(lease=until_s)

    def leave_training(self) -> None:
        """Order to leave the training after a step, on which all ranks agree, so that the process
        returns to standby. Every rank must receive it."""
        self._channel.offer(leave=True)

    def abort_training(self) -> None:
        """Order to abort the training, so that the process returns to standby. Without effect
        if the process does not read; it is killed later."""
        self._channel.offer(abort=True)

    def exit(self, status: int) -> None:
        """Order to exit with `status`; after a failure, its traceback is printed. Without effect if
        the process does not read; it is killed later."""
        self._channel.offer(exit=status)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        if self.state is not RankState.EXITED:
            signal_process(self.pid, number)
