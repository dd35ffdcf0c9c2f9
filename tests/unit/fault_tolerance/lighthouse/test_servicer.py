"""Calls whose clients have cancelled them, or died, before the servicer could notice it."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.fault_tolerance.lighthouse.test_rules import Replica
from torchtitan_lite.fault_tolerance.lighthouse.rules import QuorumSettings
from torchtitan_lite.fault_tolerance.lighthouse.servicer import LighthouseServicer


def close(servicer: LighthouseServicer) -> None:
    servicer.close()


def leave(servicer: LighthouseServicer) -> None:
    servicer.mark_left("a")


def evaluate(servicer: LighthouseServicer) -> None:
    """As the timer does once the others need not be waited for."""
    loop, untyped = servicer._loop, cast("Any", servicer)
    untyped._loop = SimpleNamespace(time=lambda: loop.time() + 100, call_at=loop.call_at)
    servicer._answer_waiting()
    assert servicer._rules.quorum is None


@pytest.mark.parametrize("what_follows", [close, leave, evaluate])
def test_a_cancelled_call_takes_part_in_nothing(
    what_follows: Callable[[LighthouseServicer], None],
) -> None:
    async def run() -> None:
        settings = QuorumSettings(
            min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=600_000
        )
        servicer = LighthouseServicer(asyncio.get_running_loop(), settings, "secret", 1)
        # The others are waited for.
        servicer._rules.heartbeat("b", servicer._loop.time())
        call = asyncio.create_task(servicer.wait_for_quorum(Replica("a:1")))
        await asyncio.sleep(0)
        assert len(servicer._waiting) == 1
        call.cancel()
        what_follows(servicer)
        with pytest.raises(asyncio.CancelledError):
            await call
        servicer.close()

    asyncio.run(run())


def test_a_heartbeat_answers_the_calls_that_waited_for_it() -> None:
    async def run() -> None:
        settings = QuorumSettings(min_replicas=2, heartbeat_timeout_ms=600_000)
        loop = asyncio.get_running_loop()
        servicer = LighthouseServicer(loop, settings, "secret", 1)
        passed_s, untyped = 0.0, cast("Any", servicer)
        untyped._run_id = "run"
        untyped._loop = SimpleNamespace(
            time=lambda: loop.time() + passed_s,
            call_at=loop.call_at,
            create_future=loop.create_future,
        )
        calls = []
        # The heartbeat of the first one has expired when the second one calls.
        for passed_s in (0.0, 700.0):
            calls.append(asyncio.create_task(servicer.wait_for_quorum(Replica(f"{passed_s}:1"))))
            await asyncio.sleep(0)
        assert len(servicer._waiting) == 2
        servicer._heartbeat({"replica_id": "0.0:1", "run_id": "run"})
        assert not servicer._waiting
        assert [(await call).ids for call in calls] == [("0.0:1", "700.0:1")] * 2
        servicer.close()

    asyncio.run(run())
