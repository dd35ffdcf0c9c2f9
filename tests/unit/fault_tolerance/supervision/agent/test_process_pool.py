"""The processes of a machine: none of them makes the pool wait."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.harness import launch
from tests.unit.fault_tolerance.supervision.agent.conftest import FakeProcess
from torchtitan_lite.core.errors import FAILED, TRANSIENT
from torchtitan_lite.core.rank.processes import ExitStatus
from torchtitan_lite.fault_tolerance.supervision.agent import process_pool
from torchtitan_lite.fault_tolerance.supervision.agent.process_pool import ProcessPool
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import (
    RankProcess,
    RankState,
)


def test_a_process_that_does_not_read_is_killed_later(stopped: list[RankProcess]) -> None:
    pool = ProcessPool(lambda: stopped[0], 0)
    pool.ranks = dict(enumerate(stopped))
    began_s = time.monotonic()
    for process in stopped:
        process.state = RankState.TRAINING
        # More than the buffer of the socket holds.
        for number in range(20_000):
            process.renew_lease(float(number))
        process.abort_training()
    pool.end(0, 1, 0.2)
    pool.end_all(0.5, aborts=True)
    assert pool.is_ending and time.monotonic() - began_s < 5
    launch.wait_until(lambda: (pool.poll(), not pool.is_ending)[1], 10)
    assert [str(process.status) for process in stopped] == ["killed by SIGKILL"] * 2


class _Pool(ProcessPool):
    """Starts stand-ins."""

    def __init__(self, num_ranks: int, num_spares: int = 0) -> None:
        self.started: list[FakeProcess] = []
        super().__init__(cast("Callable[[], RankProcess]", self._start_fake), num_spares)
        self.fill(num_ranks)

    def _start_fake(self) -> FakeProcess:
        self.started.append(FakeProcess())
        self.started[-1].state = RankState.STANDBY
        return self.started[-1]

    def fake(self, rank: int) -> Any:
        """Return the process of a rank."""
        return self.ranks[rank]


def test_a_rank_gets_a_warm_spare_first() -> None:
    pool = _Pool(1, num_spares=2)
    pool.start_spares()
    cold, warm = pool.started[1:]
    cold.state = RankState.STARTING
    pool.fill(2)
    assert pool.fake(1) is warm
    pool.fill(4)
    assert pool.fake(2) is cold and len(pool.started) == 4
    # Its own process is kept, also one that has exited, which is a failure to be reported.
    pool.fake(0).state = RankState.EXITED
    pool.fill(4)
    assert pool.fake(0) is pool.started[0]
    pool.forget_exited()
    assert sorted(pool.ranks) == [1, 2, 3]


def test_processes_for_another_mesh_start_and_surplus_ones_end() -> None:
    pool = _Pool(2, num_spares=1)
    assert not pool.prepare(4) or all(p.state is RankState.STANDBY for p in pool.started)
    pool.started[2].state = RankState.STARTING
    assert not pool.prepare(4) and len(pool.started) == 4
    pool.started[2].state = RankState.STANDBY
    assert pool.prepare(4)
    pool.end_surplus_spares()
    assert [process.state for process in pool.started].count(RankState.EXITED) == 1
    pool.fill(3)
    pool.end_surplus_ranks(1)
    assert sorted(pool.ranks) == [0]
    pool.poll()
    assert not pool.is_ending


def test_spares_that_have_exited_are_replaced() -> None:
    pool = _Pool(1, num_spares=1)
    pool.start_spares()
    pool.started[1].state = RankState.EXITED
    pool.poll()
    pool.start_spares()
    assert len(pool.started) == 3 and len(pool.processes) == 2


def _failed(pool: _Pool, rank: int, error: str, age_s: float, **more: Any) -> None:
    fake = pool.fake(rank)
    fake.state, fake.error, fake.failed_at_s = RankState.FAILED, error, time.monotonic() - age_s
    vars(fake).update(more)


def test_a_death_explains_the_exceptions_of_others() -> None:
    pool = _Pool(3)
    _failed(pool, 0, "RuntimeError: connection closed", 0.1)
    assert pool.failure(4) is None, "another rank may have died"
    pool.fake(2).state, pool.fake(2).status = RankState.EXITED, ExitStatus(-signal.SIGKILL)
    failure = pool.failure(4)
    assert failure is not None and failure.rank == 2 and failure.signature == ""
    assert failure.description == "rank 6: killed by SIGKILL" and failure.status == 0


@pytest.mark.parametrize("may_pass", [False, True])
def test_the_first_exception_is_the_failure(may_pass: bool) -> None:
    pool = _Pool(3)
    _failed(pool, 0, "RuntimeError: a consequence", 0.6)
    _failed(pool, 1, "OSError: disk 17", 0.8, may_pass=may_pass)
    failure = pool.failure(2)
    assert failure is not None and failure.rank == 1
    assert failure.description == "rank 3: OSError: disk 17"
    assert failure.status == (TRANSIENT if may_pass else FAILED)
    assert ("disk" in failure.signature) != may_pass and "17" not in failure.signature


def test_an_error_of_the_user_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _Pool(2)
    pool.fake(0).state, pool.fake(1).state = RankState.ENDED, RankState.TRAINING
    pool.fake(0).status, pool.fake(0).end_reason = ExitStatus(1), "training.steps is -1"
    assert pool.failure(0) is None, "the other rank ends with it"
    monkeypatch.setattr(process_pool, "EXIT_S", 0.0)
    failure = pool.failure(0)
    assert failure is not None and failure.rank == 0 and failure.status == 1
    assert failure.description == "rank 0: training.steps is -1" and failure.signature == ""
    assert str(failure.log) == os.devnull
    # The next generation has a limit of its own.
    monkeypatch.undo()
    pool.generation_started()
    assert pool.failure(0) is None
    pool.fake(1).state = RankState.ENDED
    assert pool.failure(0) is not None
