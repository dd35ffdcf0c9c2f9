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
        call = asyncio.create_task(servicer._wait_for_quorum(Replica("a:1")))
        await asyncio.sleep(0)
        assert len(servicer._waiting) == 1
        call.cancel()
        what_follows(servicer)
        with pytest.raises(asyncio.CancelledError):
            await call
        servicer.close()

    asyncio.run(run())
