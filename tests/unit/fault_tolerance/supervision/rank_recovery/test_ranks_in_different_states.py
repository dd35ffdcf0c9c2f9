"""Agents decide about all ranks, of which one is not as far as the others."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.fault_tolerance.supervision.rank_recovery.agent import (
    ProcessAgent,
    RankState,
    WorkerState,
)
from torchtitan_lite.fault_tolerance.supervision.rank_recovery.resize_follower import (
    ResizeFollower,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import ResizeState


def _ranks(*values: dict[str, Any]) -> dict[int, Any]:
    default = {"state": RankState.STANDBY, "has_progress": False, "poll": lambda: None}
    return {rank: SimpleNamespace(**{**default, **value}) for rank, value in enumerate(values)}


def _pool(*values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(ranks=_ranks(*values))


@pytest.mark.parametrize(
    ("second", "has_ended"), [(RankState.ENDED, True), (RankState.STANDBY, False)]
)
def test_a_run_succeeds_once_all_ranks_have_ended(second: RankState, has_ended: bool) -> None:
    agent: Any = SimpleNamespace(
        _requests=[],
        _num_forwarded=0,
        _may_forward=lambda: False,
        _ranks=_ranks({"state": RankState.ENDED}, {"state": second}),
        _spares=[],
        _failure=lambda: None,
        _made_progress=lambda: None,
        _num_spares=0,
    )
    group: Any = SimpleNamespace(workers=[])
    result = ProcessAgent._monitor_workers(agent, group)
    assert (result.state == WorkerState.SUCCEEDED) == has_ended


@pytest.mark.parametrize("has_progress", [True, False])
def test_spares_start_once_all_ranks_have_progress(has_progress: bool) -> None:
    started: list[str] = []
    agent: Any = SimpleNamespace(
        _requests=[],
        _num_forwarded=0,
        _may_forward=lambda: False,
        _ranks=_ranks({"has_progress": True}, {"has_progress": has_progress}),
        _spares=[],
        _failure=lambda: None,
        _made_progress=lambda: started.append("progress"),
        _num_spares=1,
        _start_process=lambda: started.append("spare"),
    )
    group: Any = SimpleNamespace(workers=[])
    ProcessAgent._monitor_workers(agent, group)
    assert started == (["progress", "spare"] if has_progress else [])


def _follower(*values: dict[str, Any], left_generation: int = -1) -> ResizeFollower:
    follower = ResizeFollower.__new__(ResizeFollower)
    link = SimpleNamespace(report=SimpleNamespace(ready_for=""))
    vars(follower).update(_link=link, _pool=_pool(*values), left_generation=left_generation)
    return follower


@pytest.mark.parametrize("second", [RankState.STANDBY, RankState.ENDED])
def test_a_machine_has_left_once_all_its_ranks_are_on_standby(second: RankState) -> None:
    follower = _follower({}, {"state": second}, left_generation=5)
    assert follower.has_left(5) == (second is RankState.STANDBY) and not follower.has_left(6)


@pytest.mark.parametrize("has_progress", [True, False])
def test_a_signal_waits_for_ranks_that_start_after_a_resize(has_progress: bool) -> None:
    answer: Any = SimpleNamespace(resize="", state=None, resize_state=ResizeState.LEFT)
    follower = _follower({"has_progress": True}, {"has_progress": has_progress})
    assert follower.is_between(answer, 5) != has_progress
