"""Saves beside training: into shared memory often, and from there to storage by another process.

What ranks must agree on travels in the one exchange of numbers of a step, so that saving has no
collective of its own. That exchange is also the proof that all ranks have completed the snapshot
before: none comes to it earlier.

Invariant: the newest snapshot that all ranks have is in a slot until a newer one is. Layer: above
saving, copier and background.
"""

import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.checkpoint.background.coworkers import ALONE, Coworkers
from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.checkpoint.copier import Copier
from torchtitan_lite.checkpoint.interval import SnapshotInterval
from torchtitan_lite.checkpoint.inventory import local_parts
from torchtitan_lite.checkpoint.memory.folder import leave
from torchtitan_lite.checkpoint.memory.region import Region, State
from torchtitan_lite.checkpoint.outcome import Signals
from torchtitan_lite.checkpoint.retries import Retries
from torchtitan_lite.checkpoint.saving import Attempts, Saved
from torchtitan_lite.checkpoint.snapshots import Origin
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger

NUM_SLOTS = 3
"""Of a region: the newest complete one, the one that is filled, and the one that is written."""
_HEARTBEAT_S = 0.02
_WARNING_S = 30.0


@dataclass
class _Save:
    """A save under way."""

    step: int
    slot: int
    token: str
    values: dict[str, Any]
    """The state's, as they were then."""
    hurries: bool
    """Training waits for it."""
    ordered: bool = False
    committed: bool = False
    failed: bool = False


class AsynchronousSaver:
    """Takes this rank's snapshots, and has them written. Made once the state is complete, that is,
    after the optimizer's first step or a resume."""

    def __init__(self, saved: Saved, region: Region, copier: Copier, writer: WriterProcess) -> None:
        """Use `reserving.open_saver`."""
        self._saved, self._region, self._copier, self._writer = saved, region, copier, writer
        self._interval = SnapshotInterval(saved.config.ram_interval)
        self._newest: int | None = None
        """The slot of the newest snapshot, complete or being filled."""
        self._kept: int | None = None
        """The slot of the newest one that all ranks have."""
        self._confirms: int | None = None
        """The step that the next exchange of numbers confirms."""
        self._problem = ""
        """Why the newest snapshot could not be completed."""
        self.has_outgrown = False
        """The values need more room than this rank's region has, or another's: the run needs
        others."""
        self._last_step = 0
        self._save: _Save | None = None
        self._coworkers = ALONE
        self._attempts = Attempts(saved.identity.session)
        self._is_late = False
        self._retries = Retries()
        self.saved_step: int | None = None
        self.saved_values: dict[str, Any] = {}
        _pass_signals_on(writer.signals_fd)

    @property
    def failures_in_a_row(self) -> int:
        """Saves that could not be written, one after the other."""
        return self._retries.failures_in_a_row

    def has(self, origin: Origin) -> bool:
        """Whether this region holds what the run was restored from. On a machine that has changed
        places with another one, it may be of another start, whose steps are others."""
        region = self._region
        starts = (region.taken_over_from, *region.starts)
        return origin.start in starts and origin.step in region.complete_slots()

    def keep(self, origin: Origin | None) -> None:
        """Go on with the slot from which this run was restored, if all ranks have it; all others
        are of steps that come again, and count no more."""
        self._region.settle()
        step = None if origin is None else origin.step
        for slot, header in enumerate(self._region.slots()):
            if header.step == step and header.state == State.COMPLETE and self._kept is None:
                self._kept = slot
            elif header.state != State.EMPTY:
                self._region.begin(slot, header.step)
        self._region.confirm(-1 if step is None or self._kept is None else step)
        self._last_step = self._saved.state.step - 1 if self._kept is None else step or 0

    def take_back(self, origin: Origin | None) -> None:
        """The run goes on from an earlier step, which lies in memory if it is given: later
        snapshots count no more, and none of them is written."""
        if self._save is not None:
            self._writer.abandon(self._save.step)
            self._save, self._is_late = None, True
        self._newest = self._kept = self._confirms = None
        self._problem = ""
        self.keep(origin)
        if self._kept is None:
            # Where the run goes on may not be known here yet: the next step is due.
            self._last_step = 0

    def join(self, coworkers: Coworkers) -> None:
        """Who writes with this replica from here on. A save under way that others were to write
        with it is given up, and begins again with those who are left."""
        if coworkers == self._coworkers:
            return
        save = self._save
        if save is not None and not (self._coworkers.count == coworkers.count == 1):
            logger.info("Step %d is saved anew: other replicas take part.", save.step)
            self._writer.abandon(save.step)
            self._save, self._is_late = None, True
        self._coworkers = coworkers

    def hold_still(self) -> None:
        """Come back when the snapshot under way is complete, so that the state may change."""
        self._copier.wait()

    def signals(self, step_s: float) -> Signals:
        """What the others must know. Comes back when the snapshot under way is complete."""
        self.hold_still()
        if self._problem:
            logger.error("No snapshot of step %d: %s", self._last_step, self._problem)
            if self._save is not None and not self._save.ordered:
                self._save.failed = self._save.ordered = True
        self._order()
        for response in self._writer.responses():
            self._hear(response)
        save = self._save
        if save is not None and save.ordered and not save.failed and not self._writer.alive:
            logger.error("The checkpoint writer of rank %d has died.", self._saved.mesh.rank)
            save.failed = True
        may_try = self._retries.may_try(self._saved.state.step + 1)
        return Signals(
            failed=float(save is not None and save.failed),
            committed=float(save is not None and save.committed),
            wants=float(self._is_late and may_try),
            copy_s=self._copier.seconds,
            step_s=step_s,
            lacking=float(bool(self._problem)),
        )

    def settle(self, all_ranks: Signals) -> None:
        """Act on what all ranks have said."""
        if all_ranks.lacking > 0:
            # It counts on no rank; what all had before stays.
            self._newest, self._problem, self.has_outgrown = self._kept, "", True
        elif self._confirms is not None:
            self._region.confirm(self._confirms)
            self._kept = self._newest
        self._confirms = None
        self._interval.measured(all_ranks.copy_s, all_ranks.step_s)
        save = self._save
        if save is None:
            return
        if all_ranks.committed > 0:
            self._save = None
            self._retries.succeeded()
            self.saved_step, self.saved_values = save.step, save.values
            logger.info("Saved step %d in %s", save.step, self._saved.storage.root)
        elif all_ranks.failed > 0:
            self._writer.abandon(save.step)
            self._save, self._is_late = None, True
            self._retries.failed(self._saved.state.step)
            logger.error(
                "Step %d was not saved in %s. Training goes on, and saving is tried again.",
                save.step,
                self._saved.storage.root,
            )

    def after_step(self, *, save_due: bool) -> None:
        """Take a snapshot if one is due after the step just committed, and order it to be written
        if `save_due`, which all ranks and coworkers say alike."""
        step = self._saved.state.step
        # A save that is under way is not cut off by the next.
        self._is_late = self._is_late or save_due
        saves = save_due and self._save is None
        # On another mesh than that before, nothing is left in shared memory.
        is_first = self._kept is None and self._newest is None and self._interval.is_given
        if saves or is_first or self._interval.due(step - self._last_step):
            self._snapshot(saves=saves)

    def finish(self) -> None:
        """Save the present step, and come back when it is durable. Every rank must call it.

        Raises CheckpointError when it cannot be written, also at the second try.
        """
        self.wait()
        state = self._saved.state
        if (self.saved_step, self.saved_values) == (state.step, state.values()):
            # It was under way.
            return
        for _ in range(2):
            self._snapshot(saves=True, hurries=True)
            self.wait()
            if self.saved_step == self._saved.state.step:
                return
            if self.has_outgrown:
                break
        raise CheckpointError(
            f"Step {self._saved.state.step} could not be saved in {self._saved.storage.root}; see "
            "the errors above. Its snapshot stays in shared memory."
        )

    def close(self, *, free: bool) -> None:
        """Let the writer end. `free`: the state is durable, so that its memory is given back."""
        self._copier.close()
        _pass_signals_on(-1)
        if free:
            self._writer.close(free=True)
            # Also where the writer could not.
            self._region.unlink()
            leave(self._region.path.parent, self._region.rank)
        else:
            self._writer.detach()
        self._region.close()

    def _snapshot(self, *, saves: bool, hurries: bool = False) -> None:
        state = self._saved.state
        busy = {self._kept, self._save.slot if self._save else None}
        slot = next(slot for slot in range(NUM_SLOTS) if slot not in busy)
        values, step = self._saved.values(), state.step
        self._region.begin(slot, step)
        self._copier.start(slot, local_parts(state.tensors()), lambda: self._complete(slot, values))
        self._newest, self._confirms, self._last_step = slot, step, step
        if saves:
            token = self._attempts.next(self._coworkers, step)
            self._save = _Save(step, slot, token, values["values"], hurries)
            self._is_late = False

    def _complete(self, slot: int, values: dict[str, Any]) -> None:
        """Values that have outgrown their room are no reason to end a training, and less for one
        rank alone: the others hear of it."""
        try:
            self._region.complete(slot, values)
        except ValueError as error:
            self._problem = str(error)

    def _order(self) -> None:
        """The writer is told of a save when its slot is complete."""
        save = self._save
        if save is not None and not save.ordered:
            save.ordered = True
            try:
                if not self._writer.alive:
                    self._writer.start()
            except OSError as error:
                logger.error("No checkpoint writer can be started: %s", error)
                return
            self._writer.save(
                save.slot,
                save.step,
                save.token,
                hurries=save.hurries,
                coworkers=self._coworkers,
            )

    def _hear(self, response: dict[str, Any]) -> None:
        save = self._save
        if response.get("failed") == -1:
            logger.error("The checkpoint writer: %s", response["error"])
        if save is None or response.get("token") != save.token:
            return
        if "committed" in response:
            save.committed = True
        elif "failed" in response:
            save.failed = True
            logger.error("Saving step %d: %s", save.step, response["error"])

    def wait(self) -> None:
        """Come back when no save is under way. Every rank must call it. The ranks stay in touch, so
        that a slow storage does not look like a rank that hangs; what they wait for is said every
        half minute."""
        started = said = time.monotonic()
        while True:
            numbers = self._saved.mesh.sum_of(self.signals(0.0).numbers())
            self.settle(Signals(*numbers))
            if self._save is None:
                return
            now = time.monotonic()
            if now >= said + _WARNING_S:
                said = now
                logger.warning(
                    "Step %d is still being saved in %s: all ranks have waited for it for %.0f s. "
                    "The storage is slow, or a checkpoint writer hangs in it.",
                    self._save.step,
                    self._saved.storage.root,
                    now - started,
                )
            time.sleep(_HEARTBEAT_S)


def _pass_signals_on(descriptor: int) -> None:
    """Let the writer know of signals that ask this process to leave, by the handler of the kernel
    itself: one of Python's is not run while a collective hangs. -1: no more."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
