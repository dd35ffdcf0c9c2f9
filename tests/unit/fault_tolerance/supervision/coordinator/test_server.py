"""Connections of machines that end, as the server of the coordinator sees them."""

import asyncio
import time
from unittest import mock

import pytest

from torchtitan_lite.fault_tolerance.lighthouse.servicer import LighthouseServicer
from torchtitan_lite.fault_tolerance.supervision.coordinator.coordinator import Coordinator
from torchtitan_lite.fault_tolerance.supervision.coordinator.server import _Calls
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import BROKEN_S

_REQUEST = {"replica": 0, "revision": 0, "machine": "m"}


@pytest.fixture
def coordinator() -> mock.Mock:
    return mock.Mock(spec=Coordinator, states=[])


async def _end(call: "asyncio.Task[object]") -> None:
    """End a pending call, as the end of its connection does."""
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


def test_the_end_of_an_earlier_connection_means_nothing(coordinator: mock.Mock) -> None:
    async def run() -> None:
        calls = _Calls(coordinator, mock.Mock(spec=LighthouseServicer))
        first = asyncio.create_task(calls.wait(_REQUEST))
        await asyncio.sleep(0)
        second = asyncio.create_task(calls.wait(_REQUEST))
        await asyncio.sleep(0)
        await _end(first)
        coordinator.disconnected.assert_not_called()
        await _end(second)
        coordinator.disconnected.assert_called_once_with("m", mock.ANY)
        await asyncio.sleep(BROKEN_S + 0.2)
        coordinator.check_breaks.assert_called_once()

    asyncio.run(run())


def test_one_decision_follows_the_last_of_several_connections_that_end(
    coordinator: mock.Mock,
) -> None:
    async def run() -> None:
        calls = _Calls(coordinator, mock.Mock(spec=LighthouseServicer))
        requests = [{**_REQUEST, "machine": name} for name in "abc"]
        waits = [asyncio.create_task(calls.wait(request)) for request in requests]
        await asyncio.sleep(0)
        for wait in waits:
            await _end(wait)
            await asyncio.sleep(BROKEN_S / 4)
        ended_s = time.monotonic() - BROKEN_S / 4
        while not coordinator.check_breaks.called:
            await asyncio.sleep(0.02)
        assert time.monotonic() - ended_s >= BROKEN_S
        await asyncio.sleep(BROKEN_S + 0.1)
        coordinator.check_breaks.assert_called_once()

    asyncio.run(run())


def test_machines_have_time_to_connect_again_after_a_pause_of_the_coordinator(
    coordinator: mock.Mock,
) -> None:
    async def run() -> None:
        calls = _Calls(coordinator, mock.Mock(spec=LighthouseServicer))
        wait = asyncio.create_task(calls.wait(_REQUEST))
        await asyncio.sleep(0)
        await _end(wait)
        # Nothing is served meanwhile, also no connection.
        time.sleep(BROKEN_S + 0.5)
        resumed_s = time.monotonic()
        while not coordinator.check_breaks.called:
            await asyncio.sleep(0.02)
        assert time.monotonic() - resumed_s >= BROKEN_S

    asyncio.run(run())
