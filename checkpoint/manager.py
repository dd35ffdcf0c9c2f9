"""The checkpoint manager: decides when to save, and with which saver.

Invariant: the newest complete checkpoint is never deleted.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpoint.async_saver import AsynchronousSaver
from torchtitan_lite.checkpoint.async_setup import open_async_saver, wait_for_earlier_writers
from torchtitan_lite.checkpoint.background.save import SINGLE_REPLICA, WriterGroup
from torchtitan_lite.checkpoint.format import step_name
from torchtitan_lite.checkpoint.history.fencing_tokens import (
    FencingTokens,
    TokenClaim,
    superseded_message,
)
from torchtitan_lite.checkpoint.history.identity import RunIdentity, agree_on_identity
from torchtitan_lite.checkpoint.history.lineage import SnapshotLineage, lineage_name
from torchtitan_lite.checkpoint.leftover_snapshots import SnapshotOrigin
from torchtitan_lite.checkpoint.location import checkpoint_root
from torchtitan_lite.checkpoint.restore import Restorer
from torchtitan_lite.checkpoint.save_context import (
    Checkpointable,
    SaveContext,
    SaveSignals,
)
from torchtitan_lite.checkpoint.shared_memory.folder import remove_regions
from torchtitan_lite.checkpoint.snapshots import SavedValues
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.checkpoint.sync_saver import SynchronousSaver
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import withholds_outputs
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.nn.spec import ModelSpec

_POLL_S = 0.1
_GRACE_PERIODS = 10
"""Grace periods for which a replica waits for another to save the last step, before it saves it
itself."""


class CheckpointManager:
    """Saves and restores the `Checkpointable` state of one run. Every rank calls every method."""

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        dump_folder: Path,
        state: Checkpointable,
        mesh: Mesh,
        run_config: Mapping[str, Any],
        spec: ModelSpec | None = None,
        replica: int | None = None,
        leases: Sequence[str] = (),
        last_step: int | None = None,
    ) -> None:
        """`spec` is required to load a Hugging Face folder. `replica` is the index among replicas
        that train the same run, if there are several; `leases` are those that this process holds
        (`run_lease`), which a commit requires; `last_step` is the run's final step."""
        self._config, self._state, self._mesh = config, state, mesh
        self.root = checkpoint_root(config.folder, dump_folder)
        self._context = SaveContext(
            config=config,
            state=state,
            mesh=mesh,
            storage=open_storage(self.root),
            identity=agree_on_identity(dump_folder, mesh, replica),
            lineage=SnapshotLineage(dump_folder / lineage_name(replica or 0), mesh),
            run_config=run_config,
            spec=spec,
            fencing_tokens=None if replica is None else FencingTokens(dump_folder, replica),
            leases=tuple(leases),
            last_step=last_step,
        )
        self._writer_group = SINGLE_REPLICA
        self._is_save_pending = False
        self.stored_before = -1
        """Newest stored step at the time `restore` searched for a state to resume from."""
        self.has_initial_load = False
        """Whether `restore` loaded `initial_load_path` instead of an earlier state of this run."""
        self._synchronous = SynchronousSaver(self._context)
        self._asynchronous: AsynchronousSaver | None = None
        self._may_be_async = self._can_save and config.async_mode != "disabled"
        self._has_tried_async = False
        """Whether starting the asynchronous saver was attempted."""
        self._origin: SnapshotOrigin | None = None
        self._has_segment = False
        """Whether the snapshots that are taken now belong to a segment of the history."""
        self._is_final = False
        self._step_ended = time.perf_counter()

    @property
    def identity(self) -> RunIdentity:
        """Identity of the run and of this generation."""
        return self._context.identity

    def restore(self) -> str | None:
        """Load the state that this run resumes from and return its location; None to start from
        scratch. Raises as `Restorer.restore` does."""
        has_snapshots = not self._discard_superseded_snapshots() and self._may_be_async
        # The writer of a machine that is probably lost may still commit.
        repairs = self._can_save and not withholds_outputs()
        restorer = Restorer(self._context, repairs=repairs, has_snapshots=has_snapshots)
        restored = restorer.restore()
        self.stored_before = restorer.newest_seen
        if restored is None:
            return None
        self.has_initial_load = restored.is_initial
        self._origin = restored.origin
        self._is_final = restored.is_final
        if restored.is_saved:
            self._synchronous.record_saved(self._state.step, self._state.values())
        return restored.where

    def _discard_superseded_snapshots(self) -> bool:
        """Remove this replica's snapshots if other replicas have taken the run over since. Return
        whether they have. Raises CheckpointError on all ranks if a claim is damaged."""
        fencing_tokens = self._context.fencing_tokens
        if fencing_tokens is None:
            return False
        last, taken_over = run_on_all_ranks(lambda: self._last_tokens(fencing_tokens))
        token = self._mesh.broadcast_int(last if taken_over is None else taken_over.token)
        has_lost = bool(self._mesh.broadcast_int(int(taken_over is not None)))
        if has_lost:
            remove_regions(self._context.identity.run_id)
            # On all machines, before the replica counts as up to date.
            self._mesh.any(False)
        if taken_over is not None:
            if last:
                logger.warning("%s", superseded_message(taken_over, last))
            # Without it the claims tell.
            with suppress(OSError):
                fencing_tokens.record_token(taken_over.token)
        # Until the first quorum.
        self.set_writer_group(WriterGroup(fencing_token=token))
        return has_lost

    def _last_tokens(self, fencing_tokens: FencingTokens) -> tuple[int, TokenClaim | None]:
        """Return, on the leader, the last token of this replica, and the newest claim if a takeover
        has superseded it. A folder that cannot be read supersedes nothing. Raises
        CheckpointError."""
        last = 0
        if self._mesh.is_leader:
            with suppress(OSError):
                last = fencing_tokens.last_token()
                return last, fencing_tokens.superseded_by(last)
        return last, None

    def set_writer_group(self, writer_group: WriterGroup) -> None:
        """Set the replicas that take part from now on: they write checkpoints together, or the
        first writes for all."""
        self._writer_group = writer_group
        self._saver.set_writer_group(writer_group.active)

    def wait_for_snapshot(self) -> None:
        """Block until the state may be modified."""
        self._saver.wait_for_snapshot()

    def local_signals(self) -> torch.Tensor:
        """Return this rank's `SaveSignals` for the step's reduction: `NUM_SAVE_SIGNALS` float64
        values, on the CPU. Blocks until the state may be modified."""
        step_s = time.perf_counter() - self._step_ended
        signals = self._saver.local_signals(step_s)
        return torch.tensor(signals.to_list(), dtype=torch.float64)

    def apply_signals(self, sums: torch.Tensor) -> None:
        """Act on the `local_signals` summed over all ranks."""
        signals = SaveSignals(*sums.tolist())
        # Includes replicas that know of a pending save when this one has just joined.
        self._is_save_pending = signals.save_pending > 0
        self._saver.apply_signals(signals)

    def after_step(self) -> float:
        """Start the saves that are due after the step just committed. Returns the seconds they
        took.

        A failed save is logged and retried; training continues.
        """
        started = time.perf_counter()
        step, config = self._state.step, self._config
        if not self._has_segment:
            # Not before the first step, so that a start that fails abandons nothing.
            self._begin_segment(self._origin)
        due = step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)
        if self._asynchronous is not None and self._asynchronous.needs_larger_region:
            due = self._release_memory()
        if self._may_be_async and self._asynchronous is None:
            due = self._start_async_saver(due)
        if self._can_save:
            due = due and self._writer_group.writes
            late = self._is_save_pending and self._writer_group.same_state
            self._saver.after_step(save_due=due or late)
        self._step_ended = time.perf_counter()
        return self._step_ended - started

    def _start_async_saver(self, due: bool) -> bool:
        """Try to switch to asynchronous saves and return whether a save is due now. If the writer
        of an earlier generation is still running, the next save that is `due` tries again."""
        if self._has_tried_async and not due:
            return due
        is_first_try, self._has_tried_async = not self._has_tried_async, True
        if not wait_for_earlier_writers(self._context, is_first_try=is_first_try):
            return due
        self._asynchronous = open_async_saver(
            self._context, self._origin, store=self._store_unless_stored
        )
        self._may_be_async = self._asynchronous is not None
        self._saver.set_writer_group(self._writer_group.active)
        # The leftover snapshots were freed, and no other copy of their steps exists.
        return due or (self._asynchronous is None and self._origin is not None)

    def _store_unless_stored(self) -> None:
        """Save the current step if storage lacks the one that the run resumed from, whose memory is
        about to be freed. A failed save is logged."""
        assert self._origin is not None
        # Other replicas may have resumed from another step.
        if self._writer_group.index == 0:
            stored = self._mesh.broadcast_int(self.newest_stored())
            if stored < self._origin.step:
                self._save_alone()

    def _release_memory(self) -> bool:
        """Release the shared memory so that a larger region is allocated. Returns True: a save is
        due, because one may have failed and the snapshots are gone."""
        assert self._asynchronous is not None
        self._asynchronous.close(free=True)
        self._asynchronous, self._origin = None, None
        self._may_be_async, self._has_tried_async = True, False
        return True

    def restore_earlier(self, newest: int, accepts: Callable[[SavedValues], bool]) -> str | None:
        """Restore an earlier step of this run, at most `newest`, and return its location; None,
        with nothing changed, if there is none. The position in the data is kept, and later
        snapshots are discarded. Raises as `Restorer.restore_earlier` does."""
        self.wait_for_snapshot()
        has_snapshots = self._asynchronous is not None
        restored = Restorer(
            self._context, repairs=False, has_snapshots=has_snapshots
        ).restore_earlier(newest, accepts)
        if restored is None:
            return None
        self._begin_segment(restored.origin)
        self._saver.rewind_to(restored.origin)
        return restored.where

    def discard_snapshots(self) -> None:
        """Discard this replica's snapshots: the run resumes from an earlier step, which the replica
        receives by healing."""
        self._begin_segment(None)
        self._saver.rewind_to(None)

    def _begin_segment(self, origin: SnapshotOrigin | None) -> None:
        """Abandon the snapshots that do not belong to the history of the restored state."""
        if self._can_save:
            self._context.lineage.begin_segment(origin and (origin.segment, origin.step))
        self._has_segment = True

    def wait_for_saves(self) -> None:
        """Block until no save is in progress. Every rank must call it."""
        self._saver.wait()

    def events(self) -> list[StepEvent]:
        """Return the events since the last call: copies to other machines that fail, or succeed
        again."""
        buddies = None if self._asynchronous is None else self._asynchronous.buddies
        return [] if buddies is None else buddies.events()

    @property
    def last_write(self) -> tuple[float, int]:
        """Seconds and bytes of this rank's last write of a checkpoint in the background; 0 if
        there was none."""
        return (0.0, 0) if self._asynchronous is None else self._asynchronous.last_write

    @property
    def consecutive_failures(self) -> int:
        """Consecutive failed saves."""
        return self._saver.consecutive_failures

    @property
    def saved_step(self) -> int | None:
        """Step of the newest durable checkpoint that this process wrote or resumed from."""
        return self._saver.saved_step

    def final_save(self, *, finished: bool) -> str | None:
        """Save the last step unless it is saved already, and block until it is durable. `finished`:
        the run is complete, so `last_save_model_only` applies. Raises CheckpointError on
        failure."""
        if not self._can_save:
            return None
        saver = self._saver
        if finished:
            others_save = self._writer_group.index > 0 and self._is_stored_by_others()
        else:
            # If the first replica saves for all, the state of any other is private to it.
            others_save = not self._writer_group.writes
        self.set_writer_group(self._writer_group.alone)
        if others_save or self._is_final:
            self._synchronous.record_saved(self._state.step, self._state.values())
        elif finished and self._config.last_save_model_only:
            saver.wait()
            self._synchronous.save(model_only=True)
        elif not self._is_saved():
            self._finish()
            self._synchronous.record_saved(self._state.step, self._state.values())
        if self._asynchronous is not None:
            self._asynchronous.close(free=True)
            self._asynchronous = None
        elif finished or self._origin is not None:
            # No step was taken, so no saver took the memory over.
            remove_regions(self._context.identity.run_id)
        return f"{self.root}/{step_name(self._state.step)}"

    def keep_last_step(self) -> None:
        """Save the last step if snapshots are disabled, so that a training that continues does so
        with this step. Every rank must call it. A failed save is logged."""
        is_kept = self._asynchronous is not None or self._is_final or self._is_saved()
        if self._can_save and self._writer_group.index == 0 and not is_kept:
            self._save_alone()

    def _save_alone(self) -> None:
        """Save the current step without the other replicas, which have the same state. A failed
        save is logged."""
        self._synchronous.set_writer_group(self._writer_group.alone)
        self._synchronous.after_step(save_due=True)

    def _finish(self) -> None:
        """Save the current step durably."""
        try:
            self._saver.finish()
        except CheckpointError:
            if self._asynchronous is None or not self._asynchronous.needs_larger_region:
                raise
            self._synchronous.save()

    def _is_stored_by_others(self) -> bool:
        """Return whether another replica stores the last step. Waits for it; if it died, this
        replica saves instead."""
        deadline = time.monotonic() + _GRACE_PERIODS * self._config.preemption_grace_s
        while True:
            stored = self._mesh.broadcast_int(int(self._state.step in self._stored_steps()))
            is_late = self._mesh.any(time.monotonic() >= deadline)
            if stored or is_late:
                return bool(stored)
            time.sleep(_POLL_S)

    def newest_stored(self) -> int:
        """Return the newest stored step of this run as seen by the leader; -1 if there is none, or
        on another rank. Never raises, because a storage error may be transient."""
        return max(self._stored_steps(), default=-1)

    def _stored_steps(self) -> list[int]:
        if not self._mesh.is_leader or not self._config.enable:
            return []
        try:
            return self._context.storage.steps()
        except OSError as error:
            logger.warning("%s cannot be listed: %s", self.root, error)
            return []

    def close(self) -> None:
        """Release a run that did not reach its final save; its newest snapshot is written."""
        if self._asynchronous is not None:
            self._asynchronous.close(free=False)
            self._asynchronous = None
        self._synchronous.close()
        self._context.storage.close()

    @property
    def _can_save(self) -> bool:
        return self._config.enable and not self._config.load_only

    @property
    def _saver(self) -> AsynchronousSaver | SynchronousSaver:
        return self._asynchronous or self._synchronous

    def _is_saved(self) -> bool:
        """Return whether the current step is stored. A skipped step advances the data cursor but
        not the step."""
        present = (self._state.step, self._state.values())
        return present == (self._saver.saved_step, self._saver.saved_values)
