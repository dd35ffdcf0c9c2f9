"""Stand-ins for the processes of an agent."""

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from torchtitan_lite.core.rank.processes import ExitStatus
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    RankState,
    rank_command,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import (
    ResizeRequest,
    ResizeState,
    RunMesh,
)


@pytest.fixture
def stopped() -> Iterator[list[RankProcess]]:
    """Processes that do not read their messages."""
    processes = [RankProcess(rank_command(["--help"]), dict(os.environ)) for _ in range(2)]
    for process in processes:
        process.signal(signal.SIGSTOP)
    yield processes
    for process in processes:
        process.signal(signal.SIGKILL)


class FakeProcess:
    """A process that does what the test says."""

    def __init__(self) -> None:
        self.state, self.has_progress = RankState.TRAINING, True
        self.status: ExitStatus | None = None
        self.error, self.end_reason, self.may_pass, self.pid = "", "", False, 0
        self.ends = self.may_restart = False
        self.was_stopped = False
        self.failed_at_s = 0.0
        self.is_ordered_to_leave = self.is_started = self.may_write = False
        self.signals: list[object] = []
        self.environment: Mapping[str, str] = {}
        self.has_listener = self.stays = False
        """`stays`: whether it does not follow the order to exit."""

    def poll(self) -> None:
        """Nothing has changed."""

    def allow_outputs(self) -> bool:
        """Return whether it reads its messages."""
        self.may_write = not self.stays
        return not self.stays

    def renew_lease(self, until_s: float) -> None:
        """It needs none."""

    def exit(self, status: int) -> None:
        if self.stays:
            return
        self.state, self.status = RankState.EXITED, ExitStatus(status)

    def start_training(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        listener: socket.socket | None = None,
    ) -> None:
        self.is_started, self.state = True, RankState.TRAINING
        self.environment, self.has_listener = environment, listener is not None

    def abort_training(self) -> None:
        """It may go on standby, or not."""

    def leave_training(self) -> None:
        self.is_ordered_to_leave = True

    def signal(self, number: object) -> None:
        self.signals.append(number)
        self.state = RankState.EXITED


class ObedientProcess(FakeProcess):
    """A process on standby, which trains when it is ordered to."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid
        self.state, self.has_progress = RankState.STANDBY, False

    def start_training(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        listener: socket.socket | None = None,
    ) -> None:
        super().start_training(environment, arguments, listener)
        self.error, self.status, self.has_progress, self.was_stopped = "", None, False, False

    def abort_training(self) -> None:
        if self.state in (RankState.TRAINING, RankState.FAILED):
            self.state = RankState.STANDBY

    def die(self, status: int = -signal.SIGKILL) -> None:
        """Exit."""
        self.state, self.status = RankState.EXITED, ExitStatus(status)

    def end(self, status: int = 0, *, was_stopped: bool = False, may_restart: bool = False) -> None:
        """End the training."""
        self.state, self.status, self.was_stopped = RankState.ENDED, ExitStatus(status), was_stopped
        self.may_restart = may_restart

    def fail(self, error: str) -> None:
        """Raise an exception."""
        self.state, self.error = RankState.FAILED, error
        self.failed_at_s = time.monotonic()

    def signal(self, number: object) -> None:
        self.signals.append(number)
        if number is signal.SIGKILL:
            self.die()

    def leave_training(self) -> None:
        super().leave_training()
        self.state = RankState.STANDBY


class NoRequests:
    """No request to resize."""

    is_open = False

    def __init__(self) -> None:
        self.request: ResizeRequest | None = None

    def parse(self, text: str) -> RunMesh:
        return RunMesh.from_text(text)

    def refusal(self, request_id: str, mesh: str) -> str | None:
        return None

    def answer(self, state: ResizeState, reason: str = "") -> None:
        """Nothing was requested."""

    def close(self, reason: str) -> None:
        """Nothing was requested."""
