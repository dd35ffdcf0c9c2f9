"""Restoring a run from its newest intact state, in shared memory or in storage.

Invariant: a damaged checkpoint is never loaded, and all ranks load the same one.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torchtitan_lite.checkpoint.format import parse_step_name, step_name
from torchtitan_lite.checkpoint.history.snapshot_index import HeldPart, Position
from torchtitan_lite.checkpoint.leftover_snapshots import (
    LeftoverSnapshot,
    SnapshotOrigin,
    newest_leftover,
)
from torchtitan_lite.checkpoint.loading import load, open_snapshot
from torchtitan_lite.checkpoint.save_context import PARTS, SaveContext
from torchtitan_lite.checkpoint.snapshots import SavedValues, Snapshot, model_dims
from torchtitan_lite.checkpoint.storage.base import Storage, open_parent_storage
from torchtitan_lite.core import rng
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint, UserError
from torchtitan_lite.core.log import warn_on_rank_0
from torchtitan_lite.core.urls import split
from torchtitan_lite.distributed.host_collectives import all_gather_bytes, broadcast_bytes
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.nn.spec import differing_dims

_Candidate = LeftoverSnapshot | tuple[Storage, str]
_FINAL_PARTS = {"model", "train_state"}
"""Parts of a final model-only save, from which a completed run resumes."""


@dataclass(frozen=True)
class Restored:
    """Result of a restore."""

    where: str
    origin: SnapshotOrigin | None
    """The snapshot, if the whole state was restored from shared memory."""
    is_saved: bool
    """Whether this run has stored the state."""
    is_initial: bool = False
    """Whether the state is `initial_load_path` instead of an earlier state of this run."""
    is_final: bool = False
    """Whether it is a model-only save of the last step: no step follows."""


class Restorer:
    """Loads the state that a run resumes from. Every rank calls every method."""

    def __init__(self, context: SaveContext, *, repairs: bool, has_snapshots: bool) -> None:
        """`repairs`: this run writes to the storage and repairs what a killed process left there.
        `has_snapshots`: it takes snapshots in shared memory."""
        self._context, self._repairs, self._has_snapshots = context, repairs, has_snapshots
        self._config, self._state, self._mesh = context.config, context.state, context.mesh
        self.newest_seen = -1
        """Newest stored step before anything was loaded."""

    def restore(self) -> Restored | None:
        """Load the state that this run resumes from; None to start from scratch. See `_restore`."""
        while True:
            try:
                return self._restore()
            except DamagedCheckpoint:
                # Other replicas continue, and may delete the checkpoints listed above.
                before = self.newest_seen
                if not self._context.is_shared or max(self._stored_steps(), default=-1) == before:
                    raise

    def _restore(self) -> Restored | None:
        """Load the state that this run resumes from; None to start from scratch.

        In order of precedence: the checkpoint of `load_step`; the newest intact state of this run,
        in shared memory or stored; `initial_load_path`. Raises CheckpointError if the requested
        state is missing or does not fit, and if this run has checkpoints but none is intact.
        """
        config, storage = self._config, self._context.storage
        parts = set(PARTS) - set(config.exclude_from_loading)
        steps = self._stored_steps()
        self.newest_seen = max(steps, default=-1)
        uses_snapshots = self._has_snapshots and config.load_step < 0
        leftover = self._newest_leftover() if uses_snapshots else None
        if config.load_step >= 0:
            if config.load_step not in steps:
                known = ", ".join(map(str, sorted(steps))) or "none"
                raise CheckpointError(
                    f"checkpoint.load_step = {config.load_step}, but {storage.root} holds the "
                    f"steps: {known}."
                )
            newer = [step for step in steps if step > config.load_step]
            if newer and self._repairs:
                warn_on_rank_0(
                    "%s holds later steps than checkpoint.load_step = %d: %s. A run without "
                    "load_step resumes from the newest; delete later steps to prevent that.",
                    storage.root,
                    config.load_step,
                    ", ".join(map(str, sorted(newer))),
                )
            steps = [config.load_step]
        candidates = self._newest_first(steps, leftover)
        is_initial = False
        if not candidates and config.initial_load_path is not None:
            is_initial = True
            storage, name = open_parent_storage(config.initial_load_path)
            candidates = [(storage, name)]
            if config.initial_load_model_only:
                parts &= {"model"}
        try:
            loaded = self._load_first_intact(candidates, parts)
        finally:
            # A mapped file occupies the disk even after it is deleted.
            storage.close()
        if loaded is None:
            return None
        if isinstance(loaded, LeftoverSnapshot):
            # Parts excluded from loading are not of that step.
            is_whole = not config.exclude_from_loading
            return Restored(loaded.where, loaded.origin if is_whole else None, is_saved=False)
        at_the_end = self._is_final_save(loaded, parts)
        return Restored(
            loaded.where,
            None,
            is_saved=bool(steps),
            is_initial=is_initial,
            is_final=at_the_end,
        )

    def restore_earlier(
        self, newest: int, accepts: Callable[[SavedValues], bool]
    ) -> Restored | None:
        """Load the newest intact state of this run, at most step `newest`, that `accepts` admits,
        without the position in the data. None, with nothing changed, if there is none. Raises
        CheckpointError, with the state partly overwritten, if none of the candidates is intact."""
        leftover = self._newest_leftover(newest) if self._has_snapshots else None
        storage = self._context.storage
        steps = [step for step in self._stored_steps() if step <= newest]
        candidates = self._newest_first(steps, leftover)
        try:
            parts = set(PARTS) - {"dataloader"}
            loaded = self._load_first_intact(candidates, parts, accepts)
        finally:
            storage.close()
        if loaded is None:
            return None
        origin = loaded.origin if isinstance(loaded, LeftoverSnapshot) else None
        return Restored(loaded.where, origin, is_saved=False)

    def _stored_steps(self) -> list[int]:
        """Return the steps of this run's checkpoints as seen by the leader, newest first: another
        node may see an older state of a shared folder. Repairs what a killed process left first."""
        storage = self._context.storage

        def look() -> list[int]:
            if not self._mesh.is_leader or not (self._config.enable or self._config.load_only):
                return []
            try:
                return storage.steps(repairs=self._repairs)
            except OSError as error:
                raise CheckpointError(
                    f"{storage.root} cannot be used as checkpoint.folder: {error} Repair it, "
                    "or set another checkpoint.folder."
                ) from None

        names = broadcast_bytes(" ".join(map(str, reversed(run_on_all_ranks(look)))).encode())
        return list(map(int, names.split()))

    def _newest_leftover(
        self,
        at_most: int | None = None,
        before: Position | None = None,
        excluded: Collection[HeldPart] = (),
    ) -> LeftoverSnapshot | None:
        """Return the newest snapshot of this run in shared memory, see `newest_leftover`."""
        context = self._context
        return newest_leftover(
            context.identity.run_id, self._mesh.rank, context.lineage, at_most, before, excluded
        )

    def _newest_first(
        self, steps: Sequence[int], leftover: LeftoverSnapshot | None
    ) -> list[_Candidate]:
        """Return the candidates of this run: the stored `steps`, newest first, and the leftover
        snapshot."""
        candidates: list[_Candidate] = [(self._context.storage, step_name(step)) for step in steps]
        if leftover is not None:
            newer = sum(step > leftover.saved.step for step in steps)
            candidates.insert(newer, leftover)
        return candidates

    def _load_first_intact(
        self,
        candidates: Sequence[_Candidate],
        parts: set[str],
        accepts: Callable[[SavedValues], bool] = lambda saved: True,
    ) -> Snapshot | None:
        """Load the first accepted candidate that is intact on all ranks. A damaged snapshot in
        shared memory makes the newest one without its damaged parts a candidate. All ranks must
        pass the same list, whose snapshots in shared memory are closed."""
        damage: list[str] = []
        remaining, damaged = list(candidates), set[HeldPart]()
        try:
            while remaining:
                candidate = remaining.pop(0)
                if isinstance(candidate, LeftoverSnapshot):
                    loaded = self._load_leftover(
                        candidate, parts, accepts, remaining, damage, damaged
                    )
                else:
                    loaded = self._load_stored(candidate, parts, accepts, damage)
                if loaded is not None:
                    return loaded
        finally:
            for candidate in remaining:
                if isinstance(candidate, LeftoverSnapshot):
                    candidate.close()
        if damage:
            raise DamagedCheckpoint(
                "None of the requested checkpoints is intact: " + " ".join(damage) + " Delete the "
                "damaged ones, or set another checkpoint.load_step or checkpoint.folder."
            )
        return None

    def _load_leftover(
        self,
        leftover: LeftoverSnapshot,
        parts: set[str],
        accepts: Callable[[SavedValues], bool],
        remaining: list[_Candidate],
        damage: list[str],
        damaged: set[HeldPart],
    ) -> Snapshot | None:
        """Load and close an accepted snapshot in shared memory. If it cannot be used, add why to
        `damage`, its damaged parts to `damaged`, and the newest snapshot without them to
        `remaining`, and return None."""
        try:
            if not accepts(leftover.saved):
                return None
            self._load(leftover, parts)
            run_on_all_ranks(leftover.check)
        except UserError as error:
            damage.append(
                f"{error} (`torchtitan-lite inspect --shm --free "
                f"{self._context.identity.run_id}` removes it.)"
            )
            warn_on_rank_0("The snapshot in shared memory is not used: %s", error)
            if isinstance(error, DamagedCheckpoint):
                self._insert_next(remaining, leftover, damaged)
            return None
        finally:
            leftover.close()
        return leftover

    def _load_stored(
        self,
        candidate: tuple[Storage, str],
        parts: set[str],
        accepts: Callable[[SavedValues], bool],
        damage: list[str],
    ) -> Snapshot | None:
        """Load an accepted checkpoint. If it is damaged, add why to `damage` and return None."""
        try:
            snapshot = self._open(*candidate)
            if not accepts(snapshot.saved):
                return None
            self._load(snapshot, parts)
        except DamagedCheckpoint as error:
            damage.append(str(error))
            warn_on_rank_0("Skipping a damaged checkpoint: %s", error)
            return None
        return snapshot

    def _insert_next(
        self, remaining: list[_Candidate], leftover: LeftoverSnapshot, damaged: set[HeldPart]
    ) -> None:
        """Add the damaged parts of a snapshot in shared memory to `damaged`, and insert the newest
        snapshot without any of these, if there is one, in its place among the remaining candidates:
        the same step with the other holder of the parts, or else an earlier step."""
        texts = all_gather_bytes(json.dumps(sorted(leftover.damaged)).encode())
        newly_damaged = {
            HeldPart(saver, is_copy, Position(*position))
            for text in texts
            for saver, is_copy, position in json.loads(text)
        }
        # Without a part to avoid, only an earlier step can be intact.
        before = None if newly_damaged else leftover.origin.position
        damaged |= newly_damaged
        following = self._newest_leftover(leftover.saved.step, before, damaged)
        if following is not None:
            stored = [
                parse_step_name(candidate[1]) or 0
                for candidate in remaining
                if isinstance(candidate, tuple)
            ]
            remaining.insert(sum(step > following.saved.step for step in stored), following)

    def _open(self, storage: Storage, name: str) -> Snapshot:
        spec, num_ranks = self._context.spec, self._mesh.world_size
        return run_on_all_ranks(lambda: open_snapshot(storage, name, spec, num_ranks=num_ranks))

    def _load(self, snapshot: Snapshot, parts: set[str]) -> None:
        saved = snapshot.saved
        if self._is_final_save(snapshot, parts):
            parts = _FINAL_PARTS
        elif saved.model_only and parts != {"model"}:
            raise CheckpointError(
                f"{snapshot.where} holds weights only, so training cannot resume from it. "
                "Start another run with checkpoint.initial_load_path, or delete it to resume from "
                "an earlier step."
            )
        if "model" in parts:
            self._check_dims(snapshot)
        names = {name: p.shape for name, p in snapshot.tensors.items() if _in(name, parts)}
        self._state.allocate(names)
        tensors = {name: t for name, t in self._state.tensors().items() if _in(name, parts)}
        load(snapshot, tensors, parts, self._mesh)
        self._state.load_values({part: v for part, v in saved.values.items() if part in parts})
        generators = saved.rng.get(str(self._mesh.rank))
        if "rng" in parts and generators is not None:
            rng.restore(dict(generators))

    def _check_dims(self, snapshot: Snapshot) -> None:
        """Compare model dimensions: equal shapes do not imply an equal model, for example with
        different RoPE scaling. A mismatch is an error within a run and a warning across runs."""
        here = model_dims(self._context.run_config)
        is_own = self._is_stored(snapshot) or isinstance(snapshot, LeftoverSnapshot)
        if is_own and here and not snapshot.saved.dims:
            warn_on_rank_0(
                "%s does not record the dimensions of its model: only the shapes of its weights "
                "were compared with [model].",
                snapshot.where,
            )
        differing = differing_dims(snapshot.saved.dims, here)
        if not differing:
            return
        text = f"{snapshot.where} has other model dimensions than [model]: {'; '.join(differing)}."
        if not is_own:
            warn_on_rank_0("%s Training starts from its weights with those of [model].", text)
            return
        raise CheckpointError(
            f"{text} Use the [model] section that it was saved with (`config` in its "
            "manifest.json), or start another run from it with checkpoint.initial_load_path."
        )

    def _is_final_save(self, snapshot: Snapshot, parts: set[str]) -> bool:
        """Return whether this run saved its last step there, model only."""
        saved, last = snapshot.saved, self._context.last_step
        return (
            saved.model_only
            and last is not None
            and saved.step >= last
            and parts >= _FINAL_PARTS
            and "train_state" in saved.values
            and self._is_stored(snapshot)
        )

    def _is_stored(self, snapshot: Snapshot) -> bool:
        """Whether it is in this run's storage."""
        return split(snapshot.where)[0] == self._context.storage.root


def _in(name: str, parts: set[str]) -> bool:
    return name.split(".", 1)[0] in parts
