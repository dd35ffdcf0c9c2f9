"""What a training reports to its agent, and where the agent may interrupt it, in this process."""

import gc
import os
import signal
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.core.rank.supervised import RANK_CHANNEL
from torchtitan_lite.fault_tolerance.supervision.agent import worker
from torchtitan_lite.fault_tolerance.supervision.agent.channel import AgentChannel
from torchtitan_lite.fault_tolerance.supervision.agent.worker import (
    RecoveryHooks,
    TrainingAborted,
    serve,
)


@pytest.fixture
def sent() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def recovery(sent: list[dict[str, Any]]) -> RecoveryHooks:
    channel: Any = SimpleNamespace(send=lambda **message: sent.append(message))
    return RecoveryHooks(channel)


def test_each_training_reports_its_first_step_and_its_first_error(
    recovery: RecoveryHooks, sent: list[dict[str, Any]]
) -> None:
    for _ in range(2):
        sent.clear()
        recovery.begin()
        with pytest.raises(OSError, match="the disk"), recovery.report_failure():
            for _ in range(2):
                recovery.step_committed()
            raise OSError("the disk")
        recovery.report(ValueError("a consequence"))
        failed = {"failed": "OSError: the disk", "may_pass": False, "ends": False}
        assert sent == [{"progress": True}, failed]


def test_an_order_to_leave_does_not_outlast_the_training(recovery: RecoveryHooks) -> None:
    with recovery.report_failure():
        recovery.order_to_leave()
        assert recovery.is_leaving
    with recovery.report_failure():
        assert not recovery.is_leaving


def test_each_training_can_be_interrupted_at_once_and_nothing_else(recovery: RecoveryHooks) -> None:
    for _ in range(2):
        with pytest.raises(TrainingAborted), recovery.interruptible():
            recovery.on_interrupt(0, None)
        recovery.on_interrupt(0, None)
        assert not recovery.is_interruptible


def test_an_abort_interrupts_regularly_until_the_training_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            log.append(f"pause {timeout}")
            return False

    class InTraining:
        @property
        def is_interruptible(self) -> bool:
            return len(log) < 6

    monkeypatch.setattr(worker, "_interrupt", lambda recovery: log.append("interrupt"))
    monkeypatch.setattr(worker, "abort_all_groups", lambda: log.append("abort"))
    monkeypatch.setattr(threading, "Event", Pause)
    training: Any = InTraining()
    worker._abort(training)
    pause = f"pause {worker._INTERRUPT_EVERY_S}"
    assert log == ["interrupt", "abort", pause, "interrupt", pause, "interrupt"]


def test_after_a_training_the_process_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds no process group, and needs no lease."""
    here, there = socket.socketpair()
    lease = SimpleNamespace(is_training=False)
    log: list[str] = []
    own = AgentChannel(there)

    def open_channel(end: socket.socket) -> AgentChannel:
        end.close()
        return own

    monkeypatch.setattr(worker, "AgentChannel", open_channel)
    monkeypatch.setattr(worker, "Lease", lambda: lease)
    monkeypatch.setattr(worker, "forget_groups", lambda: log.append("forgotten"))
    monkeypatch.setattr(worker, "print_into_rank_log", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setenv(RANK_CHANNEL, str(os.dup(there.fileno())))

    def agent() -> None:
        channel = AgentChannel(here)
        for _ in range(2):
            # It is on standby, and then has ended.
            log.append(f"{channel.receive(wait=True)} training: {lease.is_training}")
            start: dict[str, Any] = {"start": {}, "arguments": [], "has_listener": False}
            channel.send(**(start if len(log) == 1 else {"exit": 3}))
        channel.close()

    def train(recovery: RecoveryHooks, arguments: list[str]) -> int:
        assert lease.is_training
        return 0

    number = worker._INTERRUPT
    handler, thread = signal.getsignal(number), threading.Thread(target=agent)
    thread.start()
    try:
        assert serve(train, lambda: None, lambda: None) == 3
    finally:
        signal.signal(number, handler)
        thread.join()
        own.close()
    assert log == [
        "[{'standby': True}] training: False",
        "forgotten",
        "[{'ended': 0, 'reason': '', 'stopped': False, 'may_restart': False}] training: False",
    ]
    assert RANK_CHANNEL not in os.environ
