"""The steps of a replica in a quorum with another one: it heals, aborts, and sums gradients."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.fault_tolerance.replica.step_votes import RecordedFence
from tests.unit.fault_tolerance.replica.test_healing import Run
from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.errors import ReplicaError
from torchtitan_lite.core.phases import Phases
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.fault_tolerance.replica import fault_tolerant
from torchtitan_lite.fault_tolerance.replica.fault_tolerant import (
    _MAX_ABORTED_STEPS,
    _MAX_HEALS,
    FaultTolerantReplicas,
)
from torchtitan_lite.fault_tolerance.replica.quorum_checks import ProgressFloor


class _Pair:
    """The manager of a replica in a quorum with another one, whose gradients are equal."""

    full_id = "replica"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.commits = True
        self.fails_once = False
        self._is_broken = False
        self.quorum: Any = SimpleNamespace(
            quorum_id=0, lighthouse="", replica_ids=["a", "b"], tokens=[0, 0],
            replica_rank=0, replica_world_size=2, heal=False,
        )  # fmt: skip

    def set_progress(self, progress: int) -> None: ...

    def start_quorum(self) -> None:
        if self._is_broken:
            raise RuntimeError("the failed quorum was not forgotten")
        if self.fails_once:
            self.fails_once, self._is_broken = False, True
            raise TimeoutError("the others do not answer")
        self.quorum.quorum_id += 1

    def forget_failed_quorum(self) -> None:
        self._is_broken = False

    def connected_s(self) -> float:
        return 0.0

    def num_participants(self) -> int:
        return 2

    def participating_rank(self) -> int:
        return 0

    def errored(self) -> None:
        return None

    def abort_step(self, reason: str) -> None:
        self.calls.append(f"abort: {reason}")

    def should_commit(self) -> bool:
        self.calls.append("vote")
        return self.commits

    def all_reduce_sum(self, flat: torch.Tensor) -> Any:
        self.calls.append("reduce")
        flat *= 2
        return SimpleNamespace(wait=lambda: None, is_done=lambda: True)


@pytest.fixture
def joined(mesh: Mesh) -> Callable[..., FaultTolerantReplicas]:
    """Return a function (manager, settings) -> a replica of that manager."""

    def join(manager: _Pair, **transport: Any) -> FaultTolerantReplicas:
        untyped: Any = manager
        fence: Any = RecordedFence()
        source: Any = SimpleNamespace(**{"source": None} | transport)
        unused: Any = None
        return FaultTolerantReplicas(
            FaultToleranceConfig(quorum_timeout_s=60.0),
            Run(elements=8),
            mesh,
            manager=untyped,
            transport=source,
            floor=ProgressFloor(0),
            fence=fence,
            endpoint=lambda url: unused,
            newest_stored_step=lambda: 0,
            wait_until_modifiable=lambda: None,
            leave=unused,
            stop_requested=lambda: False,
            initial_stored_step=0,
            phases=Phases([]),
        )

    return join


def test_a_failed_request_is_forgotten_and_repeated(
    joined: Callable[..., FaultTolerantReplicas],
) -> None:
    manager = _Pair()
    manager.fails_once = True
    assert joined(manager).agree().count == 2 and manager.quorum.quorum_id == 1


def test_a_replica_heals_once_per_request(
    joined: Callable[..., FaultTolerantReplicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    healed: list[int] = []
    monkeypatch.setattr(
        fault_tolerant, "receive_state", lambda endpoint, progress, run: healed.append(progress)
    )
    replicas = joined(_Pair(), source=SimpleNamespace(url="", progress=7))
    for _ in range(2):
        replicas.agree()
        assert healed == [7]


def test_heals_that_fail_in_a_row_end_the_replica(
    joined: Callable[..., FaultTolerantReplicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This replica aborts the step of the others before it votes, so that it votes against it."""
    num_failures = 0

    def receive(endpoint: object, progress: int, run: object) -> None:
        nonlocal num_failures
        if num_failures:
            num_failures -= 1
            replicas._transport.source = source
            raise ReplicaError("the donor is lost")

    monkeypatch.setattr(fault_tolerant, "receive_state", receive)
    manager, source = _Pair(), SimpleNamespace(url="", progress=7)
    replicas: Any = joined(manager)
    for _ in range(2):
        num_failures, replicas._transport.source = _MAX_HEALS - 1, source
        assert replicas.agree().count == 2
    assert manager.calls[:2] == ["abort: the donor is lost", "vote"]
    num_failures, replicas._transport.source = _MAX_HEALS, source
    with pytest.raises(ReplicaError, match="cannot join the quorum: the donor is lost"):
        replicas.agree()


def test_steps_that_are_aborted_in_a_row_end_the_replica(
    joined: Callable[..., FaultTolerantReplicas],
) -> None:
    manager = _Pair()
    replicas = joined(manager)
    replicas.agree()
    replicas._is_first_step = False
    for _ in range(2):
        for manager.commits in [False] * (_MAX_ABORTED_STEPS - 1) + [True]:
            assert replicas.should_commit(2, 0, 0) == manager.commits
    manager.commits = False
    with pytest.raises(ReplicaError, match=f"{_MAX_ABORTED_STEPS} consecutive steps"):
        for _ in range(_MAX_ABORTED_STEPS):
            replicas.should_commit(2, 0, 0)


def test_gradients_and_counts_are_summed_over_replicas(
    joined: Callable[..., FaultTolerantReplicas],
) -> None:
    manager = _Pair()
    replicas = joined(manager)
    counts = torch.tensor([3.0], dtype=torch.float64)
    assert replicas.all_reduce(counts) and counts.item() == 6
    layer = nn.Linear(2, 2, bias=False)
    manager.calls.clear()
    replicas.reduce_during_backward(list(layer.parameters()))
    layer(torch.ones(1, 2)).sum().backward()
    assert manager.calls == ["reduce"]
    replicas.reduce(list(layer.parameters()), counts)
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[2, 2], [2, 2]]
