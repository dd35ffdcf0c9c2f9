"""The position from which semi-synchronous replicas continue after a quorum."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fault_tolerance.replica.step_votes import StepVote
from tests.unit.fault_tolerance.replica.test_healing import Run
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.phases import Phases
from torchtitan_lite.fault_tolerance.replica.fault_tolerant import FaultTolerantReplicas
from torchtitan_lite.fault_tolerance.replica.participation import Share
from torchtitan_lite.fault_tolerance.replica.quorum_checks import ProgressFloor
from torchtitan_lite.fault_tolerance.replica.semi_synchronous import (
    Averaging,
    SemiSynchronousReplicas,
    fragments_of,
)

_FURTHEST = 2**40 + 8


class _Manager(StepVote):
    """The manager of one rank of this replica, in a quorum with another one that is at
    `_FURTHEST`."""

    def __init__(self, *, loses_max: bool) -> None:
        self.quorum = SimpleNamespace(heal=False, replica_rank=0, replica_world_size=2)
        self._loses_max = loses_max

    def all_reduce_sum(self, flat: torch.Tensor) -> Any:
        flat *= 2
        return SimpleNamespace(wait=lambda: None)

    def all_reduce_max(self, flat: torch.Tensor) -> Any:
        if self._loses_max:
            self.abort_step("the other replica has died")
        else:
            flat.fill_(_FURTHEST)
        return SimpleNamespace(wait=lambda: None)

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        return SimpleNamespace(wait=lambda: True)


def _replicas(
    run: Run, manager: _Manager, any_rank: Callable[[bool], bool]
) -> SemiSynchronousReplicas:
    config = FaultToleranceConfig(
        semi_sync_method="streaming_diloco", sync_steps=2, num_fragments=1, fragment_sync_delay=1
    )
    mesh: Any = SimpleNamespace(
        any=any_rank, device=SimpleNamespace(torch_device=torch.device("cpu"))
    )
    untyped: Any = manager
    unused: Any = None
    return SemiSynchronousReplicas(
        config,
        run,
        mesh,
        averaging=Averaging(config, nn.Linear(2, 2)),
        manager=untyped,
        transport=unused,
        floor=ProgressFloor(0),
        fence=None,
        endpoint=unused,
        newest_stored_step=unused,
        wait_until_modifiable=lambda: None,
        leave=unused,
        stop_requested=unused,
        initial_stored_step=0,
        phases=Phases([]),
    )


def _run_with_a_due_average() -> Run:
    run = Run(elements=8)
    for _ in range(3):
        run.take_step()
    assert (run.step, run.cursor) == (3, 24)
    return run


@pytest.mark.parametrize(
    ("loses_max", "another_rank_lost_it", "goes_to"),
    [(False, False, _FURTHEST), (True, False, 24), (False, True, 24)],
)
def test_all_ranks_move_to_the_furthest_position_or_none(
    monkeypatch: pytest.MonkeyPatch, loses_max: bool, another_rank_lost_it: bool, goes_to: int
) -> None:
    """Also during an average whose result is not known yet."""
    monkeypatch.setattr(FaultTolerantReplicas, "agree", lambda self: Share(index=0, count=2))
    run = _run_with_a_due_average()
    manager = _Manager(loses_max=loses_max)
    replicas = _replicas(run, manager, lambda mine: mine or another_rank_lost_it)
    replicas.finish_step(committed=True, is_last=False)
    assert run.cursor == goes_to


def test_a_skipped_step_neither_starts_nor_completes_an_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other replicas count only committed steps."""
    monkeypatch.setattr(FaultTolerantReplicas, "agree", lambda self: Share(index=0, count=2))
    run = _run_with_a_due_average()
    replicas = _replicas(run, _Manager(loses_max=False), lambda mine: mine)
    replicas.finish_step(committed=False, is_last=False)
    assert run.cursor == 24
    replicas.finish_step(committed=True, is_last=False)
    assert run.cursor == _FURTHEST
    replicas.finish_step(committed=False, is_last=False)
    assert replicas.events() == []
    replicas.finish_step(committed=True, is_last=False)
    assert [event.name for event in replicas.events()] == ["averaged"]


def test_replicas_have_the_same_state_from_an_average_to_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FaultTolerantReplicas, "agree", lambda self: Share(index=0, count=2))
    replicas = _replicas(_run_with_a_due_average(), _Manager(loses_max=False), lambda mine: mine)
    for _ in range(2):
        replicas.finish_step(committed=True, is_last=False)
    assert replicas.writer_group.same_state
    replicas.agree()
    assert not replicas.writer_group.same_state


def test_after_a_failed_average_a_new_quorum_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    quorums: list[int] = []

    def agree(self: FaultTolerantReplicas) -> Share:
        quorums.append(len(quorums))
        manager._error = None
        return Share(index=0, count=2)

    monkeypatch.setattr(FaultTolerantReplicas, "agree", agree)
    manager = _Manager(loses_max=False)
    replicas = _replicas(_run_with_a_due_average(), manager, lambda mine: mine)
    for _ in range(2):
        replicas.agree()
    assert quorums == [0]
    replicas._finish_average(committed=False)
    replicas.agree()
    assert quorums == [0, 1]


def test_steps_beyond_the_integers_of_float32_are_compared_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FaultTolerantReplicas, "agree", lambda self: Share(index=0, count=2))
    run = _run_with_a_due_average()
    run.step += 2**24
    replicas = _replicas(run, _Manager(loses_max=False), lambda mine: mine)
    replicas.finish_step(committed=True, is_last=False)
    assert run.cursor == _FURTHEST


def test_an_average_starts_its_delay_before_its_step() -> None:
    config = FaultToleranceConfig(
        semi_sync_method="streaming_diloco", sync_steps=4, num_fragments=2, fragment_sync_delay=1
    )
    averaging = Averaging(config, nn.Linear(2, 2))
    # Each fragment every 2 steps, from the first one on that has taken steps since the start.
    assert [step for step in range(1, 8) if averaging.is_due(step)] == [3, 5, 7]


@pytest.mark.parametrize("sizes", [[1, 1, 100], [100, 1, 1], [1, 100, 1, 1], [3, 3, 3, 3, 3, 3]])
def test_a_model_has_as_many_fragments_as_configured_in_its_order(sizes: list[int]) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    for count in range(1, len(sizes) + 1):
        fragments = fragments_of(model, count)
        names = [name for one in fragments for name in one.parameters]
        assert names == [str(place) for place in range(len(sizes))]
        assert len(fragments) == count and all(one.parameters for one in fragments)
    with pytest.raises(ConfigError, match=f"{len(sizes) + 1}.* above the {len(sizes)} parameters"):
        fragments_of(model, len(sizes) + 1)
