"""Agents decide about all ranks, of which one is not as far as the others."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import RankState
from torchtitan_lite.fault_tolerance.supervision.agent.resize_follower import (
    ResizeFollower,
)
from torchtitan_lite.fault_tolerance.supervision.resize_request import ResizeState


def _ranks(*values: dict[str, Any]) -> dict[int, Any]:
    default = {"state": RankState.STANDBY, "has_progress": False, "poll": lambda: None}
    return {rank: SimpleNamespace(**{**default, **value}) for rank, value in enumerate(values)}


def _pool(*values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(ranks=_ranks(*values))


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
