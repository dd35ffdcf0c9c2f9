"""The process of a rank: generations after an ended one, and its lease."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.ranks import FORK_SERVER
from torchtitan_lite.core.output_fence import OUTPUTS_AFTER, lease_clock_s, wait_for_outputs
from torchtitan_lite.core.rank.supervised import RANK_CHANNEL
from torchtitan_lite.fault_tolerance.supervision.agent import worker
from torchtitan_lite.fault_tolerance.supervision.agent.channel import AgentChannel
from torchtitan_lite.fault_tolerance.supervision.agent.worker import (
    RecoveryHooks,
    serve,
)


def _serve(there: socket.socket, train_s: float, module: str) -> None:
    """Be the process of a rank, whose warm-up imports `module`."""

    def train(recovery: RecoveryHooks, changed: list[str]) -> int:
        if changed == ["unreachable"]:
            raise ConnectionRefusedError("the store")
        if changed == ["wrong"]:
            recovery.end_reason = "a wrong setting"
            return 1
        if changed == ["writes"]:
            wait_for_outputs()
        recovery.was_stopped = recovery.was_stopped or changed == ["stopped"]
        if changed == ["swallow"]:
            # As a callback of torch does.
            with recovery.report_failure(), recovery.interruptible():
                with suppress(BaseException):
                    time.sleep(60)
                time.sleep(60)
        # Raises if the groups of an earlier generation were kept.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        time.sleep(train_s)
        return 0

    def warm_up() -> None:
        import_module(module)

    os.environ[RANK_CHANNEL] = str(there.detach())
    sys.exit(serve(train, warm_up, lambda: None))


@contextmanager
def _started(train_s: float, module: str = "json") -> Iterator[tuple[AgentChannel, Any]]:
    here, there = socket.socketpair()
    with here, there:
        process = FORK_SERVER.Process(target=_serve, args=(there, train_s, module))
        process.start()
        there.close()
        try:
            yield AgentChannel(here), process
        finally:
            process.kill()
            process.join()


def _start(train_s: float) -> Iterator[tuple[AgentChannel, Any]]:
    with _started(train_s) as (channel, process):
        assert channel.receive(wait=True) == [{"standby": True}]
        yield channel, process


@pytest.fixture
def quick() -> Iterator[tuple[AgentChannel, Any]]:
    """A process whose training ends at once."""
    yield from _start(0.0)


@pytest.fixture
def slow() -> Iterator[tuple[AgentChannel, Any]]:
    """A process whose training lasts."""
    yield from _start(600.0)


def test_a_generation_may_follow_one_that_has_ended(
    quick: tuple[AgentChannel, Any],
) -> None:
    channel, process = quick
    for arguments, was_stopped in ((["stopped"], True), ([], False)):
        channel.send(start={}, has_listener=False, arguments=arguments)
        assert channel.receive(wait=True) == [
            {"ended": 0, "reason": "", "stopped": was_stopped, "may_restart": False}
        ]
    channel.send(exit=0)
    process.join(20)
    assert process.exitcode == 0


def test_an_error_before_the_process_groups_exist_is_reported(
    quick: tuple[AgentChannel, Any],
) -> None:
    channel, _ = quick
    for _ in range(2):
        channel.send(start={}, has_listener=False, arguments=["unreachable"])
        messages = channel.receive(wait=True)
        while {"standby": True} not in messages:
            messages += channel.receive(wait=True)
        assert messages[0] == {
            "failed": "ConnectionRefusedError: the store",
            "may_pass": True,
            "ends": False,
        }
    channel.send(start={}, has_listener=False, arguments=["wrong"])
    assert channel.receive(wait=True) == [
        {"ended": 1, "reason": "a wrong setting", "stopped": False, "may_restart": False}
    ]


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_outputs_are_withheld_until_the_agent_allows_them(
    pause_s: float, quick: tuple[AgentChannel, Any]
) -> None:
    channel, _ = quick
    environment = {OUTPUTS_AFTER: str(lease_clock_s() + 600)}
    channel.send(start=environment, has_listener=False, arguments=["writes"])
    time.sleep(pause_s)
    assert channel.receive(wait=False) == []
    # Also if the main thread has not read the order yet.
    channel.send(outputs=True)
    assert "ended" in channel.receive(wait=True)[0]
    # The next generation is told anew.
    channel.send(start=environment, has_listener=False, arguments=["writes"])
    time.sleep(0.5)
    assert channel.receive(wait=False) == []


@pytest.mark.parametrize("is_idle", [False, True])
def test_only_a_process_without_a_rank_uses_its_idle_time(
    is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_IDLE_S", 0.1)
    orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    uses: list[str] = []

    def give() -> None:
        for number in range(2):
            orders.put({"start": number})
        orders.put(None)

    if is_idle:
        threading.Timer(0.4, give).start()
    else:
        give()
    taken = list(worker._orders_of(orders, lambda: uses.append("used")))
    assert taken == [{"start": 0}, {"start": 1}] and uses == ["used"] * is_idle


def test_an_error_of_the_imports_is_reported() -> None:
    with _started(0.0, "not_installed") as (channel, process):
        (message,) = channel.receive(wait=True)
        assert message["failed"] == "ModuleNotFoundError: No module named 'not_installed'"
        assert message["may_pass"] is False
        process.join(20)
        assert process.exitcode == 1


def test_a_swallowed_interrupt_is_repeated(
    quick: tuple[AgentChannel, Any],
) -> None:
    channel, _ = quick
    channel.send(start={}, has_listener=False, arguments=["swallow"])
    time.sleep(0.5)
    began_s = time.monotonic()
    channel.send(abort=True)
    # It does not count as a failure of this rank.
    assert channel.receive(wait=True) == [{"standby": True}]
    assert 0.9 < time.monotonic() - began_s < 5


def test_a_rank_kills_itself_when_its_lease_ends(
    slow: tuple[AgentChannel, Any],
) -> None:
    channel, process = slow
    # A process on standby needs no lease.
    channel.send(lease=lease_clock_s() + 0.1)
    time.sleep(0.5)
    assert process.is_alive()
    channel.send(lease=lease_clock_s() + 1.0)
    channel.send(start={}, has_listener=False, arguments=[])
    for _ in range(4):
        time.sleep(0.5)
        assert process.is_alive()
        channel.send(lease=lease_clock_s() + 1.0)
    process.join(3)
    assert process.exitcode == -signal.SIGKILL
