"""What a replica does while no quorum forms."""

from typing import Any

import pytest

from tests.unit.replica.test_healing import Run
from torchtitan_lite.errors import ReplicaError
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
