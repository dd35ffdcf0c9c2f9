"""Decisions of the launcher about several replicas or ranks that are not in the same state."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.core.diagnosis import Cause
from torchtitan_lite.fault_tolerance.supervision.failures.hang_detection import STOPPED, hang_cause
from torchtitan_lite.fault_tolerance.supervision.failures.link_monitor import LinkMonitor
from torchtitan_lite.fault_tolerance.supervision.launcher import launcher, replica_process
from torchtitan_lite.fault_tolerance.supervision.launcher import plan as plan_module
from torchtitan_lite.fault_tolerance.supervision.launcher import resize as resize_module
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import LaunchPlan
from torchtitan_lite.fault_tolerance.supervision.launcher.replica_process import (
    ReplicaProcess,
    ReplicaState,
)
from torchtitan_lite.fault_tolerance.supervision.launcher.resize import Resizer, _all_train
from torchtitan_lite.fault_tolerance.supervision.launcher.status_view import PlainLines
from torchtitan_lite.fault_tolerance.supervision.launcher.worker_group import WorkerGroup
from torchtitan_lite.fault_tolerance.supervision.resize_request import ResizeState

_STATES = [state for state in ReplicaState if state is not ReplicaState.TRAINING]


def _replica(state: ReplicaState, **values: Any) -> Any:
    return SimpleNamespace(state=state, number=0, **values)


@pytest.mark.parametrize("state", _STATES)
def test_a_replica_that_does_not_train_delays_what_needs_all(state: ReplicaState) -> None:
    training = _replica(ReplicaState.TRAINING)
    assert _all_train([training, training])
    assert not _all_train([training, _replica(state)])


@pytest.mark.parametrize(
    ("is_over", "has_agent", "how"),
    [(False, True, "in place"), (False, False, "restart"), (True, True, "")],
)
def test_replicas_resize_together_and_not_while_one_ends(
    is_over: bool, has_agent: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resize_module, "_InPlaceResize", lambda replicas, target: "in place")
    events: list[str] = []
    resizer: Any = SimpleNamespace(
        mesh=SimpleNamespace(num_ranks=4),
        _wanted=lambda now_s: (SimpleNamespace(num_ranks=2), "slots are lost"),
        _in_place="",
        _restart=lambda replicas, now_s: events.append("restart"),
        _report_event=lambda text: None,
    )
    training = _replica(ReplicaState.TRAINING, is_over=False, is_training=True, has_agent=True)
    other = _replica(
        ReplicaState.TRAINING, is_over=is_over, is_training=not is_over, has_agent=has_agent
    )
    Resizer._check_target(resizer, [training, other], 0.0)
    assert "".join([*events, resizer._in_place]) == how


@pytest.mark.parametrize("have_left", [(True, True), (True, False)])
def test_replicas_start_on_the_target_once_all_have_left(have_left: tuple[bool, bool]) -> None:
    started: list[int] = []
    replicas: Any = [
        SimpleNamespace(
            has_left=has_left,
            is_over=False,
            start_generation=lambda rank=rank: started.append(rank),
        )
        for rank, has_left in enumerate(have_left)
    ]
    resizer: Any = SimpleNamespace(
        _inbox=SimpleNamespace(repeat=lambda now_s: None),
        _cancelled=None,
        _in_place=None,
        _deadline_s=9.0,
        _target="target",
    )
    Resizer.poll(resizer, replicas, 1.0)
    assert started == ([0, 1] if all(have_left) else [])


def test_a_resize_on_request_needs_an_agent_in_all_replicas() -> None:
    answers: list[Any] = []
    request = SimpleNamespace(mesh=SimpleNamespace(num_ranks=2))
    resizer: Any = SimpleNamespace(
        _inbox=SimpleNamespace(
            poll=lambda now_s: request, answer=lambda request, *answer: answers.append(answer)
        ),
        _policy=SimpleNamespace(available=lambda slots, now_s: (4, ""), most=4),
        _slots=SimpleNamespace(read=lambda now_s: {}),
        mesh="mesh",
        _requested=None,
    )
    replicas = [_replica(ReplicaState.TRAINING, has_agent=has_agent) for has_agent in (True, False)]
    Resizer._read_request(resizer, replicas, 0.0)
    assert [answer[0] for answer in answers] == [ResizeState.REJECTED]


def test_the_run_has_finished_once_all_replicas_have() -> None:
    progress = SimpleNamespace(total_steps=7)
    finished = _replica(ReplicaState.FINISHED, progress=progress)
    training = _replica(ReplicaState.TRAINING, progress=progress)
    for replicas, steps in (([finished, finished], 7), ([finished, training], None)):
        run: Any = Launcher.__new__(Launcher)
        run._replicas = replicas
        assert run.finished_steps == steps


@pytest.mark.parametrize(
    ("second", "lighthouse", "status"),
    [
        ({}, None, 0),
        ({"given_up": "it failed"}, None, 1),
        ({"was_killed": True}, None, 1),
        ({}, "it failed", 1),
    ],
)
def test_the_exit_status_is_that_of_the_worst_process(
    second: dict[str, Any], lighthouse: str | None, status: int
) -> None:
    well = {"given_up": None, "was_killed": False}
    replicas = [SimpleNamespace(**well), SimpleNamespace(**{**well, **second})]
    run: Any = SimpleNamespace(_replicas=replicas, _lighthouse=SimpleNamespace(given_up=lighthouse))
    assert Launcher._status(run) == status


@pytest.mark.parametrize(
    ("second", "is_symmetric"),
    [(ReplicaState.TRAINING, True), (_STATES[0], False)],
)
def test_links_are_compared_while_all_replicas_train(
    second: ReplicaState, is_symmetric: bool
) -> None:
    seen: list[bool] = []

    def poll(ranks: Any, now_s: float, *, is_symmetric: bool) -> list[Any]:
        seen.append(is_symmetric)
        raise StopIteration

    replicas = [
        SimpleNamespace(number=0, rank_pids={}, is_training=True, is_over=False, state=state)
        for state in (ReplicaState.TRAINING, second)
    ]
    run: Any = SimpleNamespace(
        _handle_signals=lambda now_s: None,
        _replicas=replicas,
        _plan=SimpleNamespace(is_pipelined=lambda mesh: False),
        _resizer=SimpleNamespace(mesh=None),
        _links=SimpleNamespace(poll=poll),
    )
    with pytest.raises(StopIteration):
        Launcher._poll(run)
    assert seen == [is_symmetric]


def test_a_group_has_room_for_the_most_ranks_if_an_agent_may_change_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "ReplicaProcess", lambda number, start, *others, **more: start)
    monkeypatch.setattr(
        launcher, "WorkerGroup", lambda command, environment, most, *rest, **m: most
    )

    class _Answers(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return lambda *given, **more: {} if name == "devices_of" else None

    def most(num_spares: int) -> Any:
        run: Any = _Answers(
            _plan=_Answers(num_spares=num_spares, ranks=(1, 2, 4)),
            _lighthouse=SimpleNamespace(address="host:1"),
            _environment={},
            _view=_Answers(),
            _resizer=_Answers(mesh=SimpleNamespace(num_ranks=2)),
        )
        start: Any = Launcher._replica(run, 0)
        return start(Path("logs"))

    assert (most(1), most(0)) == (4, 2)


def test_an_examination_waits_for_all_ranks_that_live(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {0}
    monkeypatch.setattr(
        replica_process, "has_newer_flight_record", lambda folder, rank, ns: rank in written
    )
    group: Any = SimpleNamespace(folder=Path("logs"), rank_pids=lambda: {0: 10, 1: 11})
    process: Any = SimpleNamespace(_examine_until_s=9.0, _asked={0, 1, 2}, _failed_at_ns=0)
    assert not ReplicaProcess._is_examined(process, group)
    written.add(1)
    assert ReplicaProcess._is_examined(process, group)
    process._examine_until_s = math.inf
    assert not ReplicaProcess._is_examined(process, group)


def test_a_dead_link_to_a_replica_that_has_one_already_is_not_reported_again() -> None:
    monitor: Any = SimpleNamespace(_num_dead=99, _last_dead_s={1: 0.0})
    dead: Any = {((0, 0), (1, 0))}
    assert LinkMonitor._dead_links(monitor, dead, 1.0) == []
    assert monitor._last_dead_s == {0: 1.0, 1: 1.0}
    monitor._last_dead_s = {}
    assert len(LinkMonitor._dead_links(monitor, dead, 1.0)) == 1


def test_a_single_stopped_rank_is_the_cause() -> None:
    ranks: Any = [SimpleNamespace(state=STOPPED), SimpleNamespace(state="S")]
    assert hang_cause(ranks, {0}, {}) is Cause.STOPPED


def test_plain_lines_show_all_replicas_while_one_trains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torchtitan_lite.fault_tolerance.supervision.launcher.status_view.describe",
        lambda one: one.state.value,
    )
    unused: Any = None
    PlainLines().update([_replica(ReplicaState.TRAINING), _replica(_STATES[0])], unused)
    assert f"replica 0: {ReplicaState.TRAINING.value}; replica 0: {_STATES[0].value}" in (
        capsys.readouterr().out
    )
    PlainLines().update([_replica(_STATES[0])], unused)
    assert not capsys.readouterr().out


def test_replicas_share_the_gpus_by_their_most_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "visible_gpus", lambda environment: ["4", "5", "6", "7"])
    plan: Any = SimpleNamespace(environment={}, uses_gpus=True, ranks=(1, 2), num_replicas=2)
    assert LaunchPlan.devices_of(plan, 1) == {"CUDA_VISIBLE_DEVICES": "6,7"}


def test_ranks_without_a_number_receive_it_when_they_have_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "torchtitan_lite.fault_tolerance.supervision.launcher.worker_group.children_of",
        lambda pid: [10, 11],
    )
    ranks = {10: SimpleNamespace(number=0), 11: SimpleNamespace(number=None)}
    group: Any = SimpleNamespace(
        _parent=SimpleNamespace(pid=9),
        _ended=set(),
        _ranks=ranks,
        replaces_ranks=True,
        _ranks_with_heartbeats=lambda: {10: 0, 11: 1},
    )
    WorkerGroup._find_ranks(group)
    assert ranks[11].number == 1
