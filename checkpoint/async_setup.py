"""Setup of asynchronous checkpointing: allocate shared memory and start the writer process."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torchtitan_lite.checkpoint.async_saver import NUM_SLOTS, AsynchronousSaver
from torchtitan_lite.checkpoint.background.buddy import NUM_COPIES
from torchtitan_lite.checkpoint.background.channel import WriterSettings
from torchtitan_lite.checkpoint.background.flush import mark_last_writer, max_wait_s
from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.checkpoint.buddies import (
    NUM_EXTRA_SLOTS,
    BuddyPairing,
    open_buddies,
    pair_buddies,
)
from torchtitan_lite.checkpoint.copier import Copier
from torchtitan_lite.checkpoint.leftover_snapshots import SnapshotOrigin
from torchtitan_lite.checkpoint.save_context import SaveContext
from torchtitan_lite.checkpoint.save_plan import plan_save
from torchtitan_lite.checkpoint.shared_memory.folder import (
    RankLock,
    lock_run_folder,
    region_files,
    region_path,
    remove_regions,
    shared_memory_folder,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import first_message

_VALUES_HEADROOM = 4
_SHORT_WAIT_S = 1.0
_ROUND_S = 0.1
"""Interval at which ranks that wait for earlier writers exchange what they see."""
_LEADER = 0


def wait_for_earlier_writers(context: SaveContext, *, is_first_try: bool) -> bool:
    """Wait for the writers of an earlier generation that still flush, one on behalf of another, and
    return whether all have ended. The first try waits as long as they may take; a warning names the
    remaining one. Every rank must call it: no new writer may take a lock that another rank waits
    for."""
    mesh, run_id = context.mesh, context.identity.run_id
    wait_s = max_wait_s(context.config.preemption_grace_s) if is_first_try else _SHORT_WAIT_S
    deadline = time.monotonic() + wait_s
    while True:
        holders = _lock_holders(run_id)
        held = first_message(next(iter(holders.values()), ""))
        if not held:
            break
        # The wait may exceed a collective's timeout, so the ranks keep in touch.
        if mesh.any(time.monotonic() >= deadline):
            break
        if not mesh.any(bool(holders.keys() - {_LEADER})):
            # It may wait for the part of a lost machine, until its grace period ends.
            _mark_last_writer(run_id)
    if held and mesh.is_leader:
        logger.warning(
            "A checkpoint writer of an earlier generation is still running: %s. Its storage may "
            "hang. Until it ends, saves are synchronous; the next save checks again.",
            held,
        )
    return not held


def _lock_holders(run_id: str) -> dict[int, str]:
    """Return, by rank, which processes hold a lock of the run on this machine after a short wait.
    Errors of the folder are left to its next user."""
    holders: dict[int, str] = {}
    with suppress(OSError, CheckpointError):
        folder = shared_memory_folder(run_id)
        deadline = time.monotonic() + _ROUND_S
        # The leader's last: its writer may hold it for longest.
        for rank in sorted(region_files(folder), reverse=True):
            lock = RankLock(folder, rank)
            if not lock.wait(deadline - time.monotonic()):
                owner = lock.owner() or "of an unknown number"
                holders[rank] = f"process {owner} holds {lock.path}"
    return holders


def _mark_last_writer(run_id: str) -> None:
    """Let the leader's writer, if it runs on this machine, end when its own part is written."""
    with suppress(OSError, CheckpointError):
        path = region_path(shared_memory_folder(run_id), _LEADER)
        if path.exists():
            mark_last_writer(path)


def open_async_saver(
    context: SaveContext, origin: SnapshotOrigin | None, store: Callable[[], None]
) -> AsynchronousSaver | None:
    """Allocate memory and start the writer; None, with a warning, if there is too little memory.

    `origin` is the snapshot that was restored from shared memory; its regions are taken over. If
    that of a rank does not match, as after a change of the mesh, it is freed before a new one holds
    a step: `store`, which may contain collectives, is called before. Every rank must call it, after
    `wait_for_earlier_writers`.
    """
    mesh, saver, problem = context.mesh, None, ""
    pairing = pair_buddies(context)
    if origin is not None and mesh.any(_replaces_region(context, pairing)):
        store()
    try:
        # Regions of ranks that an earlier generation ran here, and this one runs elsewhere, waste
        # memory.
        remove_regions(
            context.identity.run_id,
            keep=_ranks_here(mesh),
            keep_copies=pairing.sources_here if pairing else (),
        )
        saver = _open(context, origin, pairing)
    except (OSError, RuntimeError, CheckpointError) as error:
        problem = str(error) or repr(error)
    problem = first_message(problem)
    if problem:
        if saver is not None:
            saver.close(free=True)
        if mesh.is_leader:
            logger.warning("Snapshots are disabled, and saves are synchronous: %s", problem)
        return None
    assert saver is not None
    if pairing is not None:
        generation_id = None if origin is None else origin.generation_id_to_keep
        saver.buddies = open_buddies(context, pairing, saver.region_path, generation_id)
    saver.resume_from(origin)
    return saver


def _ranks_here(mesh: Mesh) -> range:
    """Return the ranks of this machine; torchrun numbers them consecutively."""
    first = mesh.rank - int(os.environ.get("LOCAL_RANK", mesh.rank))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size)))


def _open(
    context: SaveContext, origin: SnapshotOrigin | None, pairing: BuddyPairing | None
) -> AsynchronousSaver:
    """Allocate the region and start the writer. Raises OSError, RuntimeError or CheckpointError and
    releases everything."""
    config, plan = context.config, plan_save(context.state.tensors(), context.mesh)
    tokens = context.fencing_tokens
    settings = WriterSettings(
        nice=config.writer_nice,
        bytes_per_s=config.writer_mib_per_s * 2**20 or None,
        preemption_grace_s=config.preemption_grace_s,
        keep_latest_k=config.keep_latest_k,
        keep_every=config.keep_every,
        recovers=not context.is_shared,
        shared_run_folder="" if tokens is None else str(tokens.run_folder),
        replica=0 if tokens is None else tokens.replica,
        leases=context.leases,
        storages={
            scheme: f"{filesystem.__module__}:{filesystem.__qualname__}"
            for scheme, filesystem in REGISTRY.storages.items()
        },
    )
    region = _region(context, origin, plan.slot_bytes, context.describe(plan).to_dict(), pairing)
    copier = None
    try:
        slots = [region.data(slot) for slot in range(region.num_slots)]
        copier = Copier(plan, slots, context.mesh.device.torch_device)
        writer = WriterProcess(region.path, settings)
        writer.start()
    except BaseException:
        if copier is not None:
            copier.close()
        region.close()
        region.unlink()
        raise
    return AsynchronousSaver(context, region, copier, writer)


def _replaces_region(context: SaveContext, pairing: BuddyPairing | None) -> bool:
    """Return whether this rank has a region of an earlier generation that it does not take over.
    One that has none, as on another machine, has resumed from copies."""
    rank = context.mesh.rank
    with suppress(OSError, RuntimeError, CheckpointError):
        folder = shared_memory_folder(context.identity.run_id)
        if not region_path(folder, rank).exists():
            return False
        plan = plan_save(context.state.tensors(), context.mesh)
        region = Region.matching(
            folder,
            rank,
            context.describe(plan).to_dict(),
            plan.slot_bytes,
            num_slots=_num_slots(pairing),
            values_bytes=len(json.dumps(context.values())),
        )
        if region is not None:
            region.close()
            return False
    return True


def _num_slots(pairing: BuddyPairing | None) -> int:
    return NUM_SLOTS + (0 if pairing is None else NUM_EXTRA_SLOTS)


def _region(
    context: SaveContext,
    origin: SnapshotOrigin | None,
    slot_bytes: int,
    description: dict[str, Any],
    pairing: BuddyPairing | None,
) -> Region:
    """Return the region of an earlier generation if this run continues it unchanged; else a new
    one. Raises OSError or CheckpointError."""
    limit = context.config.snapshot_gib
    num_slots = _num_slots(pairing)
    # The states of other ranks are about as large.
    num_held = num_slots + (0 if pairing is None else NUM_COPIES * len(pairing.sources))
    if limit and num_held * slot_bytes > limit * 2**30:
        raise CheckpointError(
            f"{num_held} snapshots of {slot_bytes / 2**30:.2f} GiB exceed "
            f"checkpoint.snapshot_gib = {limit} per rank."
        )
    folder = shared_memory_folder(context.identity.run_id)
    present = len(json.dumps(context.values()))
    adopted = Region.adopt(
        folder,
        context.mesh.rank,
        description,
        slot_bytes,
        num_slots=num_slots,
        values_bytes=present,
        generation_id=None if origin is None else origin.generation_id_to_keep,
    )
    if adopted is not None:
        return adopted
    # The values of data sources may grow during the run.
    values_bytes = _VALUES_HEADROOM * present + (1 << 20)
    # Serialized, so that each rank sees what the ranks before it have allocated.
    with lock_run_folder(folder):
        return Region.create(
            folder, context.mesh.rank, description, slot_bytes, values_bytes, num_slots=num_slots
        )
