"""What a replica does while no quorum forms."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.threads import run_on_threads
from tests.unit.replica.test_healing import Run
from torchtitan_lite.device import detect_device
from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.mesh import Mesh, ParallelDims
from torchtitan_lite.phases import Phases
from torchtitan_lite.replica.fault_tolerant import FaultTolerantReplicas
from torchtitan_lite.replica.quorum_checks import ProgressFloor
from torchtitan_lite.schema.fault_tolerance import FaultToleranceConfig


class _Manager:
    """The manager of a replica whose requests fail, although the lighthouse has answered for
    `connected_s`."""

    def __init__(self, connected_s: float) -> None:
        self._connected_s = connected_s

    def connected_s(self) -> float:
        return self._connected_s

    def set_progress(self, progress: int) -> None: ...

    def start_quorum(self) -> None:
        raise TimeoutError("the others do not answer")

    def forget_failed_quorum(self) -> None: ...


@pytest.mark.parametrize(
    ("stored", "connected_s", "error"),
    [
        (2, 31.0, "Step 2 of this run is in storage, but .* at step 1"),
        (1, 31.0, r"No quorum .* within .* 0\.1 seconds: the others do not answer"),
        # After a cut of the network, the replicas that wrote it are about to return.
        (2, 29.0, r"No quorum .* within .* 0\.1 seconds: the others do not answer"),
    ],
)
def test_a_newer_checkpoint_ends_a_replica_that_waits_for_a_quorum(
    stored: int, connected_s: float, error: str
) -> None:
    run = Run(elements=8)
    run.take_step()
    manager: Any = _Manager(connected_s)
    unused: Any = None
    replicas = FaultTolerantReplicas(
        FaultToleranceConfig(quorum_timeout_s=0.1),
        run,
        unused,
        manager=manager,
        transport=unused,
        floor=ProgressFloor(0),
        fence=None,
        endpoint=unused,
        newest_stored_step=lambda: stored,
        wait_until_modifiable=unused,
        leave=unused,
        stop_requested=lambda: False,
        initial_stored_step=0,
        phases=Phases([]),
    )
    with pytest.raises(ReplicaError, match=error):
        replicas.agree()


def test_all_ranks_wait_for_the_reason_of_the_leader() -> None:
    def wait() -> tuple[str, int]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2))
        fence = SimpleNamespace(admit=lambda **quorum: "a claim is young", token=7, is_claimed=True)
        quorum = SimpleNamespace(quorum_id=3, lighthouse="", replica_ids=(), tokens={})
        replicas: Any = SimpleNamespace(
            _manager=SimpleNamespace(quorum=quorum, full_id="own"),
            _quorum_id=2,
            _fence=fence if mesh.is_leader else None,
        )
        reason = FaultTolerantReplicas._reason_to_wait(replicas)
        return reason, replicas._alone.fencing_token

    assert run_on_threads(2, wait) == [("a claim is young", 7)] * 2


def test_after_a_rollback_the_steps_that_the_leader_sees_in_storage_do_not_count() -> None:
    def join() -> tuple[int, int]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2))
        checked: list[int] = []
        replicas: Any = SimpleNamespace(
            _manager=SimpleNamespace(
                quorum=SimpleNamespace(quorum_id=3, heal=False),
                errored=lambda: None,
                num_participants=lambda: 2,
            ),
            _transport=SimpleNamespace(source=None),
            _quorum_id=2,
            _mesh=mesh,
            _newest_stored_step=lambda: 5 if mesh.is_leader else -1,
            _was_rolled_back=True,
            _initial_stored_step=3,
            _check_not_behind_storage=checked.append,
            _state=SimpleNamespace(cursor=8),
            _events=[],
        )
        assert FaultTolerantReplicas._join_quorum(replicas)
        return checked[0], replicas._initial_stored_step

    assert run_on_threads(2, join) == [(5, 5)] * 2


@pytest.mark.parametrize(
    ("step", "initial", "is_behind"), [(4, 6, False), (6, 3, False), (4, 3, True)]
)
def test_a_replica_is_behind_steps_that_it_has_neither_taken_nor_seen(
    step: int, initial: int, is_behind: bool
) -> None:
    replicas: Any = SimpleNamespace(_state=SimpleNamespace(step=step), _initial_stored_step=initial)
    if is_behind:
        with pytest.raises(ReplicaError, match="Step 6 of this run is in storage"):
            FaultTolerantReplicas._check_not_behind_storage(replicas, 6)
    else:
        FaultTolerantReplicas._check_not_behind_storage(replicas, 6)
