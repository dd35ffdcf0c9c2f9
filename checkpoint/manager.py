"""When to save, and by which way.

Invariant: the newest complete checkpoint is never deleted. Layer: above the rest of checkpoint/.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpoint.asynchronous import AsynchronousSaver
from torchtitan_lite.checkpoint.background.coworkers import ALONE, Coworkers
from torchtitan_lite.checkpoint.identity import identify
from torchtitan_lite.checkpoint.memory.folder import remove_regions
from torchtitan_lite.checkpoint.outcome import Signals
from torchtitan_lite.checkpoint.reserving import earlier_writers_have_ended, open_saver
from torchtitan_lite.checkpoint.restoring import Restorer
from torchtitan_lite.checkpoint.saving import Saved
from torchtitan_lite.checkpoint.snapshots import Origin, SavedValues
from torchtitan_lite.checkpoint.state import State
from torchtitan_lite.checkpoint.storage.names import step_name
from torchtitan_lite.checkpoint.storage.storage import open_storage
from torchtitan_lite.checkpoint.synchronous import SynchronousSaver
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.schema.checkpoint import CheckpointConfig
from torchtitan_lite.spec import ModelSpec

_POLL_S = 0.1
_GRACES = 10
"""For which a replica waits for another to save the last step, before it saves that itself."""


class CheckpointManager:
    """Saves and restores one run's `State`. Every rank calls every method."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        dump_folder: Path,
        state: State,
        mesh: Mesh,
        run_config: Mapping[str, Any],
        spec: ModelSpec | None = None,
        replica: int | None = None,
        last_step: int | None = None,
    ) -> None:
        """`spec` is needed to load a Hugging Face folder.

        `replica` tells this one from others that train the same run, where there are such;
        `last_step` is where the run ends."""
        self._config, self._state, self._mesh = config, state, mesh
        folder = config.folder
        self.root = folder if "://" in folder else str(dump_folder / folder)
        self._saved = Saved(
            config=config,
            state=state,
            mesh=mesh,
            storage=open_storage(self.root),
            identity=identify(dump_folder, mesh, replica or 0),
            run_config=run_config,
            spec=spec,
            is_shared=replica is not None,
            last_step=last_step,
        )
        self._coworkers = ALONE
        self._is_wanted = False
        self.stored_before = -1
        """The newest step that was stored when `restore` looked for what to start from."""
        self.has_initial_load = False
        """Whether `restore` loaded `initial_load_path`, and no earlier state of this run."""
        self._synchronous = SynchronousSaver(self._saved)
        self._asynchronous: AsynchronousSaver | None = None
        self._may_be_asynchronous = self._saves and config.async_mode != "disabled"
        self._has_tried = False
        """To be asynchronous."""
        self._origin: Origin | None = None
        self._is_over = False
        self._step_ended = time.perf_counter()

    def restore(self) -> str | None:
        """Load what this run starts from, and return where it lay; None to start afresh. Raises as
        `Restorer.restore` does."""
        restorer = Restorer(self._saved, mends=self._saves, remembers=self._may_be_asynchronous)
        restored = restorer.restore()
        self.stored_before = restorer.newest_seen
        if restored is None:
            return None
        self.has_initial_load = restored.is_initial
        self._origin = restored.origin
        self._is_over = restored.is_the_end
        if restored.is_saved:
            self._synchronous.knows(self._state.step, self._state.values())
        return restored.where

    def join(self, coworkers: Coworkers) -> None:
        """Which replicas take part from here on: they write checkpoints together, or the first does
        for all."""
        self._coworkers = coworkers
        self._saver.join(coworkers.together)

    def hold_still(self) -> None:
        """Come back when the state may change."""
        self._saver.hold_still()

    def counted(self, device: torch.device) -> torch.Tensor:
        """What this rank adds to the step's exchange of numbers: float64, `NUM_SIGNALS` of them.
        Comes back when the state may change."""
        step_s = time.perf_counter() - self._step_ended
        signals = self._saver.signals(step_s)
        return torch.tensor(signals.numbers(), dtype=torch.float64).to(device, non_blocking=True)

    def settle(self, sums: torch.Tensor) -> None:
        """Act on `counted`, summed over all ranks."""
        signals = Signals(*sums.tolist())
        # Also of replicas that know of a save that is late, when this one has just come.
        self._is_wanted = signals.wants > 0
        self._saver.settle(signals)

    def after_step(self) -> float:
        """Save what is due after the step just committed. Returns the seconds that it took.

        A save that fails is reported and training goes on: it is tried again.
        """
        started = time.perf_counter()
        step, config = self._state.step, self._config
        due = step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)
        if self._asynchronous is not None and self._asynchronous.has_outgrown:
            due = self._give_up_memory()
        if self._may_be_asynchronous and self._asynchronous is None:
            due = self._become_asynchronous(due)
        if self._saves:
            due = due and self._coworkers.writes
            late = self._is_wanted and self._coworkers.alike
            self._saver.after_step(save_due=due or late)
        self._step_ended = time.perf_counter()
        return self._step_ended - started

    def _become_asynchronous(self, due: bool) -> bool:
        """Whether a save is due now. Where a writer of an earlier start is in the way, the next one
        that is `due` tries again."""
        if self._has_tried and not due:
            return due
        is_first_try, self._has_tried = not self._has_tried, True
        if not earlier_writers_have_ended(self._saved, is_first_try=is_first_try):
            return due
        self._asynchronous = open_saver(self._saved, self._origin)
        self._may_be_asynchronous = self._asynchronous is not None
        self._saver.join(self._coworkers.together)
        # What lay in memory had to give way: nothing else has these steps.
        return due or (self._asynchronous is None and self._origin is not None)

    def _give_up_memory(self) -> bool:
        """So that a larger one is reserved. Whether a save is due now: one may have failed, and the
        snapshots are gone."""
        assert self._asynchronous is not None
        self._asynchronous.close(free=True)
        self._asynchronous, self._origin = None, None
        self._may_be_asynchronous, self._has_tried = True, False
        return True

    def go_back(self, newest: int, accepts: Callable[[SavedValues], bool]) -> str | None:
        """Give the state what it was at an earlier step of this run, `newest` at most, and return
        where it lay; None, with nothing changed, where there is none. Its place in the data stays.
        Later snapshots count no more. Raises as `Restorer.go_back` does."""
        self.hold_still()
        remembers = self._asynchronous is not None
        found = Restorer(self._saved, mends=False, remembers=remembers).go_back(newest, accepts)
        if found is None:
            return None
        self._saver.take_back(found.origin)
        return found.where

    def take_back(self) -> None:
        """The run goes on from an earlier step that this replica has to receive: its own snapshots
        count no more."""
        self._saver.take_back(None)

    def wait_for_saves(self) -> None:
        """Come back when no save is under way. Every rank must call it."""
        self._saver.wait()

    @property
    def failures_in_a_row(self) -> int:
        """Saves that could not be written, one after the other."""
        return self._saver.failures_in_a_row

    @property
    def saved_step(self) -> int | None:
        """Step of the newest durable checkpoint that this process has written or resumed from."""
        return self._saver.saved_step

    def final_save(self, *, finished: bool) -> str | None:
        """Save the last step, unless it is saved already, and come back when it is durable.
        `finished`: the run is at its end, so that `last_save_model_only` applies. Raises
        CheckpointError when it fails."""
        if not self._saves:
            return None
        saver = self._saver
        if finished:
            others_save = self._coworkers.index > 0 and self._is_stored_by_others()
        else:
            # Where the first saves for all, what another has is its own alone.
            others_save = not self._coworkers.writes
        self.join(ALONE)
        if others_save or self._is_over:
            self._synchronous.knows(self._state.step, self._state.values())
        elif finished and self._config.last_save_model_only:
            saver.wait()
            self._synchronous.save(model_only=True)
        elif not self._is_saved():
            self._finish()
            self._synchronous.knows(self._state.step, self._state.values())
        if self._asynchronous is not None:
            self._asynchronous.close(free=True)
            self._asynchronous = None
        elif finished or self._origin is not None:
            # No step was taken since, so nobody took the memory over.
            remove_regions(self._saved.identity.run_id)
        return f"{self.root}/{step_name(self._state.step)}"

    def _finish(self) -> None:
        """Save the present step durably."""
        try:
            self._saver.finish()
        except CheckpointError:
            if self._asynchronous is None or not self._asynchronous.has_outgrown:
                raise
            self._synchronous.save()

    def _is_stored_by_others(self) -> bool:
        """Whether the replica that has to save the last step does. It is waited for; should it
        have died, this one saves instead."""
        deadline = time.monotonic() + _GRACES * self._config.preemption_grace_s
        while True:
            stored = self._mesh.leader_says(int(self._state.step in self._stored_steps()))
            is_late = self._mesh.any(time.monotonic() >= deadline)
            if stored or is_late:
                return bool(stored)
            time.sleep(_POLL_S)

    def newest_stored(self) -> int:
        """The newest step of this run that is stored, as the leader sees it; -1: none, or another
        rank. Raises nothing: a storage that fails now may be well later."""
        return max(self._stored_steps(), default=-1)

    def _stored_steps(self) -> list[int]:
        if not self._mesh.is_leader or not self._config.enable:
            return []
        try:
            return self._saved.storage.steps()
        except OSError as error:
            logger.warning("%s cannot be looked at: %s", self.root, error)
            return []

    def close(self) -> None:
        """Let go of a run that did not come to its final save: its newest snapshot is written."""
        if self._asynchronous is not None:
            self._asynchronous.close(free=False)
            self._asynchronous = None
        self._synchronous.close()
        self._saved.storage.close()

    @property
    def _saves(self) -> bool:
        return self._config.enable and not self._config.load_only

    @property
    def _saver(self) -> AsynchronousSaver | SynchronousSaver:
        return self._asynchronous or self._synchronous

    def _is_saved(self) -> bool:
        """Whether the present step is stored. A refused step moves the data cursor on and not the
        step."""
        present = (self._state.step, self._state.values())
        return present == (self._saver.saved_step, self._saver.saved_values)
