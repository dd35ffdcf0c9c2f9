"""The folder of a run, which no other run may use. Layer: above config and checkpoint."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.checkpoint import (
    checkpoint_root,
    replica_run_id,
    run_long_on_all_ranks,
    run_on_all_ranks,
    shared_run_id,
)
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY, user_folder
from torchtitan_lite.config import Config
from torchtitan_lite.errors import FAILED, CheckpointError, UserError
from torchtitan_lite.lease_file import open_lease_file
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.preemption import TrainingAborted
from torchtitan_lite.process_exit import exit_process
from torchtitan_lite.rank_recovery.lease import kill_writers
from torchtitan_lite.run_lease import (
    FolderInUse,
    LeasePlaces,
    RunLease,
    lease_places,
    wait_until_free,
)


def places_of(config: Config) -> LeasePlaces:
    """Return where the run of `config` has its leases."""
    folder = Path(config.job.dump_folder)
    root = checkpoint_root(config.checkpoint, folder) if config.checkpoint.enable else ""
    return lease_places(folder, root, config.fault_tolerance.replica)


def check_folder(config: Config) -> None:
    """Return once no other run uses the folder. Raises FolderInUse, unless job.when_in_use lets it
    wait."""
    wait_until_free(places_of(config), waits=config.job.when_in_use == "wait")


@contextmanager
def hold_folder(config: Config, mesh: Mesh, *, stays: bool) -> Iterator[None]:
    """Hold the leases of the run in the block: that of its folder on the leader, and on each
    machine that of its snapshots in shared memory. Every rank must call it. `stays`: an agent
    restarts the training in this process, so that they stay after an error. Raises FolderInUse, or
    CheckpointError if the folder is a copy of one in use, on all ranks."""
    leases: list[RunLease] = []

    def acquire(tick: Callable[[], None]) -> None:
        if mesh.is_leader:
            lease = RunLease(places_of(config), on_loss=_stop_writing)
            lease.acquire(waits=config.job.when_in_use == "wait", tick=tick)
            leases.append(lease)

    is_released = True
    try:
        run_long_on_all_ranks(acquire)
        leases += run_on_all_ranks(lambda: _hold_snapshots(config))
        yield
    except UserError:
        raise
    except (Exception, TrainingAborted):
        is_released = not stays
        raise
    finally:
        for lease in leases if is_released else ():
            lease.release()


def _hold_snapshots(config: Config) -> list[RunLease]:
    """Hold the lease of the run's snapshots on this machine, on its first rank. Raises
    CheckpointError."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or not SHARED_MEMORY.is_dir():
        return []
    folder = Path(config.job.dump_folder)
    run_id = replica_run_id(shared_run_id(folder), config.fault_tolerance.replica or 0)
    file = open_lease_file(str(user_folder()), f"{run_id}.lease")
    lease = RunLease(LeasePlaces(held=(file,), other=lambda: ()), on_loss=_stop_writing)
    try:
        lease.acquire(waits=False, tick=lambda: None)
    except FolderInUse as error:
        who = error.who
    else:
        return [lease]
    # Not as the consequence of an error that may pass.
    raise CheckpointError(
        f"{folder} has the identity of another run, from whose folder it was copied: {who}. "
        f"Delete {folder / 'run_id'}, so that it becomes a run of its own."
    )


def _stop_writing(reason: str) -> None:
    """End this process, and do not save: what it would write belongs to another run."""
    logger.error("%s", reason)
    kill_writers(os.getpid())
    exit_process(FAILED)
