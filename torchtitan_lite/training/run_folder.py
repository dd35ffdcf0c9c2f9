"""The folder of a run, which no other run may use."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.checkpoint import checkpoint_root, run_id_in
from torchtitan_lite.checkpoint.shared_memory import SHARED_MEMORY, user_folder
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import FAILED, CheckpointError, UserError
from torchtitan_lite.core.lease_file import open_lease_file
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.preemption import TrainingAborted
from torchtitan_lite.core.process_exit import exit_process
from torchtitan_lite.core.run_lease import (
    FolderInUse,
    LeasePlaces,
    RunLease,
    join_instance,
    joined_instance,
    lease_places,
    new_instance,
    supervised_instance,
    wait_until_free,
)
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import (
    first_message,
    run_long_on_all_ranks,
    run_on_all_ranks,
)
from torchtitan_lite.fault_tolerance.supervision.agent.lease import kill_writers


def places_of(config: Config) -> LeasePlaces:
    """Return where the run of `config` has its leases."""
    folder = Path(config.job.dump_folder)
    checkpoint = config.checkpoint
    root = checkpoint_root(checkpoint.folder, folder) if checkpoint.enable else ""
    return lease_places(folder, root, config.fault_tolerance.replica)


def check_folder(config: Config) -> None:
    """Return once no other run uses the folder. Raises FolderInUse, unless job.when_in_use lets it
    wait."""
    wait_until_free(places_of(config), waits=config.job.when_in_use == "wait")


@contextmanager
def hold_folder(config: Config, mesh: Mesh, *, stays: bool) -> Iterator[tuple[str, ...]]:
    """Hold the leases of the run in the block: that of its folder on the leader, and on each
    machine that of its snapshots in shared memory. Yield those of its folder, as paths or URLs;
    none on other ranks. Every rank must call it. `stays`: an agent restarts the training in this
    process, so that they stay after an error. Raises FolderInUse, or CheckpointError if the folder
    is a copy of one in use, on all ranks."""
    # A rank that took part before a leader was lost knows the instance, a new leader may not.
    instance = first_message(joined_instance()) or first_message(supervised_instance())
    instance = instance or first_message(new_instance() if mesh.is_leader else "")
    join_instance(instance)
    folder = RunLease(places_of(config), instance, on_loss=_stop_writing)
    snapshots: list[RunLease] = []

    def acquire(tick: Callable[[], None]) -> str:
        """Return the refusal, so that all ranks raise the same error."""
        if mesh.is_leader:
            try:
                folder.acquire(waits=config.job.when_in_use == "wait", tick=tick)
            except FolderInUse as error:
                return str(error)
        return ""

    is_released = True
    try:
        if problem := first_message(run_long_on_all_ranks(acquire)):
            raise FolderInUse(problem)
        snapshots += run_on_all_ranks(lambda: _hold_snapshots(config, instance))
        yield folder.places
    except UserError:
        raise
    except (Exception, TrainingAborted):
        is_released = not stays
        raise
    finally:
        for lease in (folder, *snapshots) if is_released else ():
            lease.release()


def _hold_snapshots(config: Config, instance: str) -> list[RunLease]:
    """Hold the lease of the run's snapshots on this machine, on its first rank. Raises UserError
    and OSError."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or not SHARED_MEMORY.is_dir():
        return []
    folder = Path(config.job.dump_folder)
    run_id = run_id_in(folder, config.fault_tolerance.replica)
    file = open_lease_file(str(user_folder()), f"{run_id}.lease")
    places = LeasePlaces(folder=folder, held=(file,), other=lambda: ())
    lease = RunLease(places, instance, on_loss=_stop_writing)
    try:
        lease.acquire(waits=False)
    except FolderInUse as error:
        holder = error.holder
    else:
        return [lease]
    # Outside of `except`, so that no error that may pass is its cause.
    if holder is None or holder.folder == str(folder.resolve()):
        process = "?" if holder is None else holder.stop_pid
        raise CheckpointError(
            f"{folder} is in use by another run on this machine: process {process}."
        )
    raise CheckpointError(
        f"{folder} has the identity of another run, from whose folder {holder.folder} it was "
        f"copied, and which process {holder.stop_pid} trains. Delete {folder / 'run_id'}, so that "
        "it becomes a run of its own."
    )


def _stop_writing(reason: str) -> None:
    """End this process, and do not save: what it would write belongs to another run."""
    logger.error("%s", reason)
    kill_writers(os.getpid())
    exit_process(FAILED)
