"""Asynchronous checkpointing: frequent snapshots to shared memory, which a writer process saves to
storage.

What ranks must agree on is part of the step's single reduction, so saving adds no collective of its
own. That reduction also proves that all ranks have completed the previous snapshot, because no rank
enters it earlier.

Invariant: the newest snapshot that all ranks have stays in its slot until a newer one exists.
"""

import logging
import math
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.checkpoint.background.save import SINGLE_REPLICA, WriterGroup
from torchtitan_lite.checkpoint.buddies import BuddyCopies, CopySignals
from torchtitan_lite.checkpoint.copier import Copier
from torchtitan_lite.checkpoint.history.snapshot_index import HeldPart, Position
from torchtitan_lite.checkpoint.leftover_snapshots import SnapshotOrigin
from torchtitan_lite.checkpoint.save_context import (
    AttemptTokens,
    RetryBackoff,
    SaveContext,
    SaveSignals,
)
from torchtitan_lite.checkpoint.shared_memory.folder import release_rank
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotState
from torchtitan_lite.checkpoint.tensors import local_tensors
from torchtitan_lite.core.diagnosis import WRITER, Cause, Diagnosis, report_diagnosis, report_text
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.log import logger

NUM_SLOTS = 3
"""Slots per region: the newest complete one, the one being filled, and the one being written.
Buddy copies add `buddies.NUM_EXTRA_SLOTS`."""
_HEARTBEAT_S = 0.02
_OF_ANOTHER_RANK = re.compile(r"CheckpointError: rank \d+: ")
"""Error of the leader's writer after that of another rank."""
_WARNING_S = 30.0
MAX_STEP_FRACTION = 0.03
"""Maximum fraction of step time that snapshots may cost if no interval is given."""


@dataclass
class _Save:
    """A save in progress."""

    step: int
    slot: int
    token: str
    values: dict[str, Any]
    """Non-tensor state at the time of the snapshot."""
    urgent: bool
    """Whether training waits for the save."""
    ordered: bool = False
    committed: bool = False
    failed: bool = False


class AsynchronousSaver:
    """Takes this rank's snapshots and orders their saves. Created once the state is complete: after
    the optimizer's first step, or after a resume."""

    def __init__(
        self, context: SaveContext, region: Region, copier: Copier, writer: WriterProcess
    ) -> None:
        """Use `async_setup.open_async_saver` instead."""
        self._context, self._region, self._copier, self._writer = context, region, copier, writer
        self.buddies: BuddyCopies | None = None
        """Copies on other machines, if they are enabled."""
        self._interval = SnapshotInterval(context.config.ram_interval)
        self._newest_slot: int | None = None
        """Slot of the newest snapshot, complete or being filled."""
        self._common_slot: int | None = None
        """Slot of the newest snapshot that all ranks have."""
        self._step_to_confirm: int | None = None
        """Step that the next reduction confirms."""
        self._problem = ""
        """Error of the newest snapshot, if it could not be completed."""
        self.needs_larger_region = False
        """Whether the values outgrew the region of this rank or another: the run needs larger
        regions."""
        self._snapshot_step = 0
        self._save: _Save | None = None
        self._writer_group = SINGLE_REPLICA
        self._tokens = AttemptTokens(context.identity.generation_id)
        self._save_pending = False
        self._backoff = RetryBackoff()
        self.saved_step: int | None = None
        self.saved_values: dict[str, Any] = {}
        self.last_write = 0.0, 0
        """Seconds and bytes of this rank's last write of its part of a checkpoint; 0 before the
        first."""
        self._dead_writer: int | None = None
        """Process id of the writer whose death was reported last."""
        _forward_signals(writer.signals_fd)

    @property
    def region_path(self) -> Path:
        """Path of this rank's snapshots."""
        return self._region.path

    @property
    def consecutive_failures(self) -> int:
        """Consecutive failed saves."""
        return self._backoff.consecutive_failures

    def resume_from(self, origin: SnapshotOrigin | None) -> None:
        """Resume with the slot from which this run was restored, if all ranks have it, and keep the
        newest snapshot of which there are copies until a newer one is copied. All other slots hold
        steps that will be repeated, and are invalidated. Every rank must call it."""
        region = self._region
        kept = self.slots_to_keep(origin)
        for slot, header in enumerate(region.slots()):
            if slot not in kept.values() and header.state != SlotState.EMPTY:
                region.begin(slot, header.step)
        # If only some ranks resumed with an old snapshot, ranks would take the next ones at
        # different steps.
        if origin is not None and not self._context.mesh.any(origin.position not in kept):
            self._common_slot, self._snapshot_step = kept[origin.position], origin.step
            region.confirm(origin.step)
        else:
            self._common_slot, self._snapshot_step = None, self._context.state.step - 1
            region.confirm(-1)
        if self.buddies is None or origin is None:
            region.finish_takeover()
        if self.buddies is not None:
            position = origin and (origin.copied_position or origin.position)
            self.buddies.resume_from(position and kept.get(position), position)

    def slots_to_keep(self, origin: SnapshotOrigin | None) -> dict[Position, int]:
        """Return the slots of this region that `resume_from` keeps. After machines were swapped,
        the region may belong to another generation with different steps."""
        region = self._region
        if origin is None:
            return {}
        wanted = {origin.position: origin.generation_id}
        if self.buddies is not None and origin.copied_position is not None:
            wanted.setdefault(
                origin.copied_position, origin.copied_generation_id or origin.generation_id
            )
        generation_ids = {*region.earlier_generation_ids, *region.generation_ids}
        complete = region.complete_slots()
        return {
            position: complete[position.step]
            for position, generation_id in wanted.items()
            if generation_id in generation_ids
            and position.step in complete
            and HeldPart(region.rank, False, position) not in origin.damaged
        }

    def rewind_to(self, origin: SnapshotOrigin | None) -> None:
        """Discard snapshots after an earlier step to which the run rolls back, and abandon their
        saves. `origin` is that step's snapshot, if it is in shared memory."""
        if self._save is not None:
            self._writer.abandon(self._save.step)
            self._save, self._save_pending = None, True
        self._newest_slot = self._step_to_confirm = None
        self._problem = ""
        self.resume_from(origin)

    def set_writer_group(self, writer_group: WriterGroup) -> None:
        """Set the replicas that write with this one. A save in progress that other replicas take
        part in is abandoned and restarted with the new group."""
        if writer_group == self._writer_group:
            return
        save = self._save
        if save is not None and not (self._writer_group.count == writer_group.count == 1):
            logger.info("Step %d is saved again: the group of replicas changed.", save.step)
            self._writer.abandon(save.step)
            self._save, self._save_pending = None, True
        if writer_group.alone != self._writer_group.alone:
            self._writer.set_writer_group(writer_group)
        self._writer_group = writer_group

    def wait_for_snapshot(self) -> None:
        """Block until the snapshot in progress is complete and the state may be modified."""
        self._copier.wait()

    def local_signals(self, step_s: float) -> SaveSignals:
        """Return this rank's signals for the step's reduction. Blocks until the snapshot in
        progress is complete."""
        self.wait_for_snapshot()
        if self._problem:
            logger.error("No snapshot of step %d: %s", self._snapshot_step, self._problem)
            if self._save is not None and not self._save.ordered:
                self._save.failed = self._save.ordered = True
        self._report_dead_writer()
        self._send_order()
        for response in self._writer.responses():
            self._handle(response)
        save = self._save
        if save is not None and save.ordered and not save.failed and not self._writer.alive:
            self._report_dead_writer()
            save.failed = True
        copies = CopySignals() if self.buddies is None else self.buddies.signals()
        may_retry = self._backoff.may_retry(self._context.state.step + 1)
        return SaveSignals(
            failed=float(save is not None and save.failed),
            committed=float(save is not None and save.committed),
            save_pending=float(self._save_pending and may_retry),
            copy_s=self._copier.seconds,
            step_s=step_s,
            snapshot_failed=float(bool(self._problem)),
            buddy_pending=copies.pending,
            buddy_failed=copies.failed,
            buddy_stuck=copies.stuck,
        )

    def apply_signals(self, all_ranks: SaveSignals) -> None:
        """Act on the signals summed over all ranks."""
        if all_ranks.snapshot_failed > 0:
            # The snapshot counts on no rank; the previous common one stays.
            self._newest_slot, self._problem, self.needs_larger_region = self._common_slot, "", True
            if self.buddies is not None:
                self.buddies.cancel()
        elif self._step_to_confirm is not None:
            self._region.confirm(self._step_to_confirm)
            self._common_slot = self._newest_slot
        self._step_to_confirm = None
        if self.buddies is not None and self.buddies.apply(
            CopySignals(all_ranks.buddy_pending, all_ranks.buddy_failed, all_ranks.buddy_stuck)
        ):
            # Until now, older copies may have belonged to the earlier generation alone.
            self._region.finish_takeover()
        self._interval.update(all_ranks.copy_s, all_ranks.step_s)
        save = self._save
        if save is None:
            return
        if all_ranks.committed > 0:
            self._save = None
            self._backoff.succeeded()
            self.saved_step, self.saved_values = save.step, save.values
            logger.info("Saved step %d in %s", save.step, self._context.storage.root)
        elif all_ranks.failed > 0:
            self._writer.abandon(save.step)
            self._save, self._save_pending = None, True
            self._backoff.failed(self._context.state.step)
            logger.error(
                "Step %d was not saved in %s. Training continues, and the save will be retried.",
                save.step,
                self._context.storage.root,
            )

    def after_step(self, *, save_due: bool) -> None:
        """Take a snapshot if one is due after the step just committed, and order its save if
        `save_due`, which must be equal on all ranks and replicas of the group."""
        step = self._context.state.step
        # The next save does not interrupt a save in progress.
        self._save_pending = self._save_pending or save_due
        saves = save_due and self._save is None
        copies = self.buddies is not None and self.buddies.is_due(step)
        # On a different mesh than before, shared memory holds no usable snapshot.
        is_first = (
            self._common_slot is None and self._newest_slot is None and self._interval.enabled
        )
        if saves or copies or is_first or self._interval.due(step - self._snapshot_step):
            self._snapshot(saves=saves)
            if copies:
                assert self.buddies is not None and self._newest_slot is not None
                self.buddies.begin(self._newest_slot, step)

    def finish(self) -> None:
        """Save the current step and block until it is durable. Every rank must call it.

        Raises CheckpointError if the second attempt fails too.
        """
        self.wait()
        state = self._context.state
        if (self.saved_step, self.saved_values) == (state.step, state.values()):
            # The save in progress was of this very state.
            return
        for _ in range(2):
            self._snapshot(saves=True, urgent=True)
            self.wait()
            if self.saved_step == self._context.state.step:
                return
            if self.needs_larger_region:
                break
        raise CheckpointError(
            f"Step {self._context.state.step} could not be saved in {self._context.storage.root}; "
            "see the errors above. Its snapshot stays in shared memory."
        )

    def close(self, *, free: bool) -> None:
        """Let the writer finish. `free`: the state is durable, so its shared memory is released."""
        self._copier.close()
        _forward_signals(-1)
        if self.buddies is not None:
            self.buddies.close(free=free)
        if free:
            self._writer.close(free=True)
            # Needed if the writer could not remove it.
            self._region.unlink()
            release_rank(self._region.path.parent, self._region.rank)
        else:
            self._writer.detach()
        self._region.close()

    def _snapshot(self, *, saves: bool, urgent: bool = False) -> None:
        state = self._context.state
        busy = {self._common_slot, self._save.slot if self._save else None}
        if self.buddies is not None:
            busy |= self.buddies.slots
        slot = next(slot for slot in range(self._region.num_slots) if slot not in busy)
        values, step = self._context.values(), state.step
        self._region.begin(slot, step)
        self._copier.start(
            slot, local_tensors(state.tensors()), lambda: self._complete(slot, values)
        )
        self._newest_slot, self._step_to_confirm, self._snapshot_step = slot, step, step
        if saves:
            token = self._tokens.next(self._writer_group, step)
            self._save = _Save(step, slot, token, values["values"], urgent)
            self._save_pending = False

    def _complete(self, slot: int, values: dict[str, Any]) -> None:
        """Mark the snapshot complete. Values that outgrew the region do not end the training; the
        failure is signaled to the other ranks."""
        try:
            self._region.complete(slot, values)
        except ValueError as error:
            self._problem = str(error)

    def _send_order(self) -> None:
        """Order the save once its slot is complete."""
        save = self._save
        if save is not None and not save.ordered:
            save.ordered = True
            try:
                if not self._writer.alive:
                    self._writer.start()
            except OSError as error:
                logger.error("The checkpoint writer could not be started: %s", error)
                return
            self._writer.save(
                save.slot,
                save.step,
                save.token,
                urgent=save.urgent,
                writer_group=self._writer_group,
            )

    def _report_dead_writer(self) -> None:
        pid = self._writer.pid
        if pid is None or self._writer.alive or pid == self._dead_writer:
            return
        self._dead_writer = pid
        text = "the checkpoint writer has died; another is started for the next save"
        rank = self._context.mesh.rank
        died = Diagnosis(cause=Cause.PROCESS_DIED, text=text, rank=rank, process=WRITER)
        report_diagnosis(died, logging.ERROR)

    def _handle(self, response: dict[str, Any]) -> None:
        save = self._save
        if response.get("failed") == -1:
            logger.error("The checkpoint writer: %s", response["error"])
        if "seconds" in response:
            self.last_write = float(response["seconds"]), int(response["bytes"])
        if save is None or response.get("token") != save.token:
            return
        if "committed" in response:
            save.committed = True
        elif "failed" in response:
            save.failed = True
            text = f"Saving step {save.step}: {response['error']}"
            if _OF_ANOTHER_RANK.search(text):
                # That rank reports its own error.
                logger.error("%s", text)
            else:
                rank = self._context.mesh.rank
                report_text(text, rank=rank, process=WRITER, level=logging.ERROR)

    def wait(self) -> None:
        """Block until no save is in progress. Every rank must call it. The ranks keep exchanging
        signals, so a slow storage is not mistaken for a hang; a warning is logged every 30
        seconds."""
        started = warned = time.monotonic()
        while True:
            numbers = self._context.mesh.all_reduce_numbers(self.local_signals(0.0).to_list())
            self.apply_signals(SaveSignals(*numbers))
            if self._save is None:
                return
            now = time.monotonic()
            if now >= warned + _WARNING_S:
                warned = now
                logger.warning(
                    "Step %d is still being saved in %s: all ranks have waited for %.0f s. "
                    "The storage is slow, or a checkpoint writer hangs.",
                    self._save.step,
                    self._context.storage.root,
                    now - started,
                )
            time.sleep(_HEARTBEAT_S)


class SnapshotInterval:
    """Steps between two snapshots: given, or the fewest that cost at most 3% of the step time.

    All ranks apply the same summed measurements, so they compute the same interval.
    """

    def __init__(self, configured: int) -> None:
        """`configured`: -1 derives the interval from the cost; 0 disables snapshots."""
        self._configured = configured
        self._copy_s = self._step_s = 0.0
        """Seconds per copy and per step, summed over ranks; a decaying minimum of recent values,
        because other load on a machine makes single ones longer."""
        self.steps = max(configured, 1)

    @property
    def enabled(self) -> bool:
        """Whether snapshots are taken independently of saves."""
        return self._configured != 0

    def update(self, copy_s: float, step_s: float) -> None:
        """Record the seconds of a snapshot and of a step, both summed over all ranks."""
        if self._configured != -1 or copy_s <= 0 or step_s <= 0:
            return
        self._copy_s = min(copy_s, self._copy_s * 1.1) if self._copy_s else copy_s
        self._step_s = min(step_s, self._step_s * 1.1) if self._step_s else step_s
        self.steps = max(1, math.ceil(self._copy_s / (MAX_STEP_FRACTION * self._step_s)))

    def due(self, steps_since: int) -> bool:
        """Return whether a snapshot is due `steps_since` steps after the last."""
        return self.enabled and steps_since >= self.steps


def _forward_signals(descriptor: int) -> None:
    """Forward stop signals to the writer through the C-level wakeup descriptor: Python signal
    handlers do not run while a collective hangs. -1 disables it."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
