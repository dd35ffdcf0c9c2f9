"""Reserves what saves beside training need: shared memory, and the process that writes.

Layer: above asynchronous.
"""

import json
import os
import time
from contextlib import suppress
from typing import Any

from torchtitan_lite.checkpoint.agreement import first_said
from torchtitan_lite.checkpoint.asynchronous import NUM_SLOTS, AsynchronousSaver
from torchtitan_lite.checkpoint.background.grace import longest_s
from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.checkpoint.background.settings import WriterSettings
from torchtitan_lite.checkpoint.copier import Copier
from torchtitan_lite.checkpoint.inventory import take_inventory
from torchtitan_lite.checkpoint.memory.folder import (
    alone_in,
    regions_in,
    remove_regions,
    run_folder,
)
from torchtitan_lite.checkpoint.memory.lock import RankLock
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.checkpoint.saving import Saved
from torchtitan_lite.checkpoint.snapshots import Origin
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh

_ROOM_FOR_VALUES = 4
_SHORT_WAIT_S = 1.0


def earlier_writers_have_ended(saved: Saved, *, is_first_try: bool) -> bool:
    """Whether no writer of an earlier start flushes any more what that left, one for another. They
    are waited for, as long as they may take at the first try; a warning says who is left. Every
    rank must call it: all are through before a new writer takes a lock that another waits for."""
    mesh = saved.mesh
    wait_s = longest_s(saved.config.preemption_grace_s) if is_first_try else _SHORT_WAIT_S
    deadline = time.monotonic() + wait_s
    while held := first_said(_held(saved.identity.run_id)):
        # Ranks stay in touch: the wait may be longer than a collective may take.
        if mesh.any(time.monotonic() >= deadline):
            break
    if held and mesh.is_leader:
        logger.warning(
            "A checkpoint writer of an earlier start has not ended: %s. It may hang in its "
            "storage. Until it has, training waits while a checkpoint is written; the next save "
            "looks again.",
            held,
        )
    return not held


def _held(run_id: str) -> str:
    """Who holds a lock of the run on this machine, after a short wait; "" for nobody. What is wrong
    with the folder, who uses it next says."""
    with suppress(OSError, CheckpointError):
        folder = run_folder(run_id)
        deadline = time.monotonic() + _SHORT_WAIT_S
        for rank in regions_in(folder):
            lock = RankLock(folder, rank)
            if not lock.wait(deadline - time.monotonic()):
                return f"process {lock.owner() or 'of an unknown number'} holds {lock.path}"
    return ""


def open_saver(saved: Saved, origin: Origin | None) -> AsynchronousSaver | None:
    """Reserve memory, and start the writer; None, with a warning, where there is too little.

    `origin` is what was restored from shared memory: its regions are taken over.
    Every rank must call it, once `earlier_writers_have_ended`.
    """
    mesh, saver, problem = saved.mesh, None, ""
    try:
        # What an earlier start had here and this one has elsewhere is memory wasted.
        remove_regions(saved.identity.run_id, keep=_ranks_here(mesh))
        saver = _open(saved, origin)
    except (OSError, RuntimeError, CheckpointError) as error:
        problem = str(error) or repr(error)
    problem = first_said(problem)
    if problem:
        if saver is not None:
            saver.close(free=True)
        if mesh.is_leader:
            logger.warning(
                "Snapshots are off, and training waits while a checkpoint is written: %s", problem
            )
        return None
    assert saver is not None
    # Ranks of which some went on with an old snapshot would take the next ones at other steps.
    has_it = origin is not None and saver.has(origin)
    saver.keep(None if mesh.any(not has_it) else origin)
    return saver


def _ranks_here(mesh: Mesh) -> range:
    """The ranks of this machine, which torchrun numbers one after the other."""
    first = mesh.rank - int(os.environ.get("LOCAL_RANK", mesh.rank))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size)))


def _open(saved: Saved, origin: Origin | None) -> AsynchronousSaver:
    """Raises OSError, RuntimeError or CheckpointError, and leaves nothing then."""
    config, inventory = saved.config, take_inventory(saved.state.tensors(), saved.mesh)
    settings = WriterSettings(
        nice=config.writer_nice,
        bytes_per_s=config.writer_mib_per_s * 2**20 or None,
        preemption_grace_s=config.preemption_grace_s,
        keep_latest_k=config.keep_latest_k,
        keep_every=config.keep_every,
        recovers=not saved.is_shared,
    )
    region = _region(saved, origin, inventory.slot_bytes, saved.describe(inventory).to_dict())
    try:
        slots = [region.data(slot) for slot in range(NUM_SLOTS)]
        copier = Copier(inventory, slots, saved.mesh.device.torch_device)
        writer = WriterProcess(region.path, settings)
        writer.start()
    except BaseException:
        region.close()
        region.unlink()
        raise
    return AsynchronousSaver(saved, region, copier, writer)


def _region(
    saved: Saved, origin: Origin | None, slot_bytes: int, description: dict[str, Any]
) -> Region:
    """The one of an earlier start, if this run goes on in the same way; else a new one. Raises
    OSError or CheckpointError."""
    limit = saved.config.snapshot_gib
    if limit and NUM_SLOTS * slot_bytes > limit * 2**30:
        raise CheckpointError(
            f"Three snapshots of {slot_bytes / 2**30:.2f} GiB are more than "
            f"checkpoint.snapshot_gib = {limit} a rank."
        )
    folder = run_folder(saved.identity.run_id)
    present = len(json.dumps(saved.values()))
    adopted = Region.adopt(
        folder,
        saved.mesh.rank,
        description,
        slot_bytes,
        num_slots=NUM_SLOTS,
        values_bytes=present,
        start=None if origin is None else origin.start,
    )
    if adopted is not None:
        return adopted
    # Sources of data may have more to say later than at the start.
    values_bytes = _ROOM_FOR_VALUES * present + (1 << 20)
    # One after the other: each sees what those before it have taken.
    with alone_in(folder):
        return Region.create(
            folder, saved.mesh.rank, description, slot_bytes, values_bytes, num_slots=NUM_SLOTS
        )
