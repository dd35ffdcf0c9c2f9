"""Decisions of the launcher about several replicas or ranks that are not in the same state."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.core.diagnosis import Cause
from torchtitan_lite.fault_tolerance.supervision.failures.hang_detection import STOPPED, hang_cause
from torchtitan_lite.fault_tolerance.supervision.failures.link_monitor import LinkMonitor
from torchtitan_lite.fault_tolerance.supervision.launcher import launcher
from torchtitan_lite.fault_tolerance.supervision.launcher import plan as plan_module
from torchtitan_lite.fault_tolerance.supervision.launcher.launcher import Launcher
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import LaunchPlan
from torchtitan_lite.fault_tolerance.supervision.launcher.replica import ReplicaState
from torchtitan_lite.fault_tolerance.supervision.launcher.resize import Resizer, _all_train
from torchtitan_lite.fault_tolerance.supervision.launcher.status_view import PlainLines
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh

_STATES = [state for state in ReplicaState if state is not ReplicaState.TRAINING]


def _replica(state: ReplicaState, **values: Any) -> Any:
    return SimpleNamespace(state=state, number=0, **values)


@pytest.mark.parametrize("state", _STATES)
def test_a_replica_that_does_not_train_delays_what_needs_all(state: ReplicaState) -> None:
    training = _replica(ReplicaState.TRAINING)
    assert _all_train([training, training])
    assert not _all_train([training, _replica(state)])


@pytest.mark.parametrize(
    ("is_over", "is_training", "how"),
    [(False, True, "follow"), (False, False, "restart"), (True, False, "")],
)
def test_replicas_resize_together_and_not_while_one_ends(
    is_over: bool, is_training: bool, how: str
) -> None:
    done: list[str] = []
    resizer: Any = SimpleNamespace(
        mesh=RunMesh(4),
        _wanted=lambda now_s: (RunMesh(2), "slots are lost"),
        _follow=lambda request, reason, is_users: done.append("follow"),
        _restart=lambda *given: done.append("restart"),
    )
    training = _replica(ReplicaState.TRAINING, is_over=False, is_training=True)
    other = _replica(ReplicaState.TRAINING, is_over=is_over, is_training=is_training)
    Resizer._check_target(resizer, [training, other], 0.0)
    assert "".join(done) == how


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


def test_a_replica_has_room_for_the_most_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resize may change their number."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(launcher, "Replica", lambda number, **values: made.update(values))
    plan: Any = SimpleNamespace(
        ranks=(1, 2, 4),
        log_folder=lambda number: Path("logs"),
        metrics_file=lambda number: Path("metrics"),
        devices_of=lambda number: {"CUDA_VISIBLE_DEVICES": "3"},
    )
    run: Any = Launcher.__new__(Launcher)
    run._plan, run._environment, run._view = plan, {"A": "b"}, PlainLines()
    Launcher._replica(run, 0)
    assert made["max_ranks"] == 4
    assert made["environment"].items() >= {"A": "b", "CUDA_VISIBLE_DEVICES": "3"}.items()


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
