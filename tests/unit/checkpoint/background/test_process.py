"""Handles of background processes. The process is `cat`, which responds with its orders."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from torchtitan_lite.checkpoint.background.channel import WriterChannel
from torchtitan_lite.checkpoint.background.process import BackgroundProcess


@pytest.fixture
def process() -> Iterator[BackgroundProcess]:
    made = BackgroundProcess(["cat"], {"settings": 1})
    yield made
    made.close()


def test_a_new_process_receives_its_settings_and_no_earlier_order(
    process: BackgroundProcess,
) -> None:
    for _ in range(2):
        assert not process._send({"order": 1})
        process.start()
        assert process._send({"order": 2})
        assert process.wait_for("order", 30) == [{"settings": 1}, {"order": 2}]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait_for("exit", 30)


def test_an_ended_process_is_forgotten(process: BackgroundProcess) -> None:
    process.start()
    pid = process.pid
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    # Its death may still be reported.
    assert not process.alive and process.pid == pid
    process.close()
    assert process.pid is None and process.close() == []


def test_orders_to_a_dead_process_are_not_gathered(process: BackgroundProcess) -> None:
    process.start()
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    for number in range(3):
        assert not process._send({"order": number})
    assert not process._unsent


def test_a_detached_process_ends_on_its_own(process: BackgroundProcess) -> None:
    process.start()
    child = process._process
    assert child is not None
    process.wait_for("settings", 30)
    process.detach()
    assert process.pid is None and process.responses() == []
    assert child.wait(30) == 0


def test_a_channel_waits_although_nobody_can_signal_any_more() -> None:
    """The end of a pipe is always readable."""
    ends = [*os.pipe(), *os.pipe()]
    channel: Any = object.__new__(WriterChannel)
    channel._incoming, channel._signals, channel._orders = ends[0], ends[2], []
    channel.ended_at, channel.stop_requested = None, False
    os.write(ends[3], bytes([signal.SIGTERM]))
    channel.poll()
    assert channel.stop_requested and channel._signals is not None
    os.close(ends[3])
    channel.poll()
    assert channel._signals is None and channel.poll() == []
    for end in ends[:3]:
        os.close(end)
