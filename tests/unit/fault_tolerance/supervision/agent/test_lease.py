"""A rank whose lease has ended stops training."""

import os
import signal
from typing import NoReturn

import pytest

from torchtitan_lite.fault_tolerance.supervision.agent import lease
from torchtitan_lite.fault_tolerance.supervision.agent.lease import Lease


class _Killed(Exception):
    pass


@pytest.mark.parametrize(("trains_from_s", "ends_after_s"), [(0, 5), (8, 8)])
def test_a_rank_that_trains_is_killed_at_the_end_of_its_lease(
    monkeypatch: pytest.MonkeyPatch, trains_from_s: int, ends_after_s: int
) -> None:
    """One on standby needs none."""
    now_s, held = 0, Lease()
    held._until_s = 5

    def sleep(_: float) -> None:
        nonlocal now_s
        now_s += 1
        held.is_training = now_s > trains_from_s

    def kill(pid: int, number: int) -> NoReturn:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise _Killed

    monkeypatch.setattr(lease.time, "sleep", sleep)
    monkeypatch.setattr(lease, "lease_clock_s", lambda: now_s)
    monkeypatch.setattr(lease.os, "kill", kill)
    monkeypatch.setattr(lease, "kill_writers", lambda parent: None)
    with pytest.raises(_Killed):
        held._watch()
    assert now_s == ends_after_s + 1


@pytest.mark.parametrize("has_finished", [False, True])
def test_the_writer_of_a_process_on_standby_ends_with_the_lease_unless_it_has_finished(
    monkeypatch: pytest.MonkeyPatch, has_finished: bool
) -> None:
    """Also if the agent, which would kill it, is blocked."""
    now_s, held, killed = 0, Lease(), []
    held._until_s, held.has_finished = 3, has_finished

    def sleep(_: float) -> None:
        nonlocal now_s
        now_s += 1
        if now_s == 7:
            held._until_s = 9
        if now_s == 15:
            raise _Killed

    monkeypatch.setattr(lease.time, "sleep", sleep)
    monkeypatch.setattr(lease, "lease_clock_s", lambda: now_s)
    monkeypatch.setattr(lease, "kill_writers", lambda parent: killed.append(now_s))
    with pytest.raises(_Killed):
        held._watch()
    # Once at the end of each lease.
    assert killed == ([] if has_finished else [4, 10])
