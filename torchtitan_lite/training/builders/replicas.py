"""Join the other replicas of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.checkpoint import FencingTokens, shared_run_id
from torchtitan_lite.config import Config, config_fingerprint
from torchtitan_lite.core.phases import Phases
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.core.rank.supervised import announce
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.fault_tolerance.replica import Replicas
from torchtitan_lite.training.builders.state import RestoredState


@contextmanager
def join_replicas(
    config: Config, mesh: Mesh, stop: StopRequest, restored: RestoredState, phases: Phases
) -> Iterator[Replicas]:
    """Join the other replicas, and leave them at the end of the block."""
    # Imported here because importing torchft takes a second.
    from torchtitan_lite.fault_tolerance.replica.joining import join

    checkpoints, run_folder = restored.checkpoints, Path(config.job.dump_folder)
    announce("joining")
    with join(
        config.fault_tolerance,
        restored.state,
        mesh,
        run_id=shared_run_id(run_folder) if mesh.is_leader else "",
        fencing_tokens=FencingTokens(run_folder, config.fault_tolerance.replica_id),
        config_fingerprint=config_fingerprint(config, mesh.world_size),
        newest_stored_step=checkpoints.newest_stored,
        wait_until_modifiable=checkpoints.wait_for_snapshot,
        stop_requested=lambda: stop.requested,
        initial_stored_step=checkpoints.stored_before,
        phases=phases,
        averaging=restored.averaging,
    ) as replicas:
        yield replicas
