"""What a run starts from: its newest intact state, in shared memory or stored.

Invariant: a damaged checkpoint is never loaded, and all ranks load the same one. Layer: above
loader, remembered and saving.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_lite import rng
from torchtitan_lite.checkpoint.agreement import together
from torchtitan_lite.checkpoint.loader import load
from torchtitan_lite.checkpoint.opening import open_snapshot
from torchtitan_lite.checkpoint.remembered import newest_remembered
from torchtitan_lite.checkpoint.saving import Saved
from torchtitan_lite.checkpoint.snapshots import (
    Origin,
    RememberedSnapshot,
    SavedValues,
    Snapshot,
    model_dims,
)
from torchtitan_lite.checkpoint.state import PARTS
from torchtitan_lite.checkpoint.storage.names import step_name
from torchtitan_lite.checkpoint.storage.storage import Storage, split_storage
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, UserError
from torchtitan_lite.log import logger
from torchtitan_lite.messages import leader_says
from torchtitan_lite.spec import differing_dims

_Candidate = RememberedSnapshot | tuple[Storage, str]
_OF_THE_END = {"model", "train_state"}
"""Parts of a last save of the weights alone, which a run that has come to its end goes on from."""


@dataclass(frozen=True)
class Restored:
    """What was loaded."""

    where: str
    origin: Origin | None
    """If all of it lay in shared memory."""
    is_saved: bool
    """Whether this run has it stored."""
    is_initial: bool = False
    """Whether it was `initial_load_path`, and no earlier state of this run."""
    is_the_end: bool = False
    """The weights alone, of the last step: nothing follows."""


class Restorer:
    """Loads what a run starts from. Every rank calls every method."""

    def __init__(self, saved: Saved, *, mends: bool, remembers: bool) -> None:
        """`mends`: this run writes there, so that what a killed one left is mended. `remembers`:
        it has snapshots in shared memory."""
        self._saved, self._mends, self._remembers = saved, mends, remembers
        self._config, self._state, self._mesh = saved.config, saved.state, saved.mesh
        self.newest_seen = -1
        """The newest step that was stored when this looked, before anything was loaded."""

    def restore(self) -> Restored | None:
        """Load what this run starts from; None to start afresh. See `_restore`."""
        while True:
            try:
                return self._restore()
            except DamagedCheckpoint:
                # Other replicas go on, and delete what was there when this one looked.
                before = self.newest_seen
                if not self._saved.is_shared or max(self._stored_steps(), default=-1) == before:
                    raise

    def _restore(self) -> Restored | None:
        """Load what this run starts from; None to start afresh.

        In this order: the checkpoint of `load_step`; the newest intact state of this run, in shared
        memory or stored; `initial_load_path`. Raises CheckpointError when what was asked for is not
        there or does not fit, and when this run has checkpoints but none is intact.
        """
        config, storage = self._config, self._saved.storage
        parts = set(PARTS) - set(config.exclude_from_loading)
        steps = self._stored_steps()
        self.newest_seen = max(steps, default=-1)
        remembered = None
        if config.load_step >= 0:
            if config.load_step not in steps:
                known = ", ".join(map(str, sorted(steps))) or "none"
                raise CheckpointError(
                    f"checkpoint.load_step = {config.load_step}, but {storage.root} holds the "
                    f"steps: {known}."
                )
            newer = [step for step in steps if step > config.load_step]
            if newer and self._mends:
                logger.warning(
                    "%s holds later steps than checkpoint.load_step = %d: %s. A start without "
                    "load_step resumes from the newest; delete them if they shall not be used.",
                    storage.root,
                    config.load_step,
                    ", ".join(map(str, sorted(newer))),
                )
            steps = [config.load_step]
        elif self._remembers:
            remembered = newest_remembered(self._saved.identity.run_id, self._mesh.rank)
        candidates = self._newest_first(steps, remembered)
        is_initial = False
        if not candidates and config.initial_load_path is not None:
            is_initial = True
            storage, name = split_storage(config.initial_load_path)
            candidates = [(storage, name)]
            if config.initial_load_model_only:
                parts &= {"model"}
        try:
            found = self._load_first_intact(candidates, parts)
        finally:
            # A file that is mapped keeps its place on the disk when it is deleted.
            storage.close()
            if remembered is not None:
                remembered.close()
        if found is None:
            return None
        if isinstance(found, RememberedSnapshot):
            # What was left out is not of that step.
            is_whole = not config.exclude_from_loading
            return Restored(found.where, found.origin if is_whole else None, is_saved=False)
        at_the_end = self._is_the_end(found, parts)
        return Restored(
            found.where,
            None,
            is_saved=bool(steps),
            is_initial=is_initial,
            is_the_end=at_the_end,
        )

    def go_back(self, newest: int, accepts: Callable[[SavedValues], bool]) -> Restored | None:
        """Load the newest intact state of this run, up to step `newest`, that is accepted: all of
        it but the place in the data. None, with nothing changed, where there is none. Raises
        CheckpointError, with the state torn, when none of those that are there is intact."""
        remembered = None
        if self._remembers:
            run_id = self._saved.identity.run_id
            remembered = newest_remembered(run_id, self._mesh.rank, newest)
        storage = self._saved.storage
        steps = [step for step in self._stored_steps() if step <= newest]
        candidates = self._newest_first(steps, remembered)
        try:
            parts = set(PARTS) - {"dataloader"}
            found = self._load_first_intact(candidates, parts, accepts)
        finally:
            storage.close()
            if remembered is not None:
                remembered.close()
        if found is None:
            return None
        origin = found.origin if isinstance(found, RememberedSnapshot) else None
        return Restored(found.where, origin, is_saved=False)

    def _stored_steps(self) -> list[int]:
        """The steps of this run's checkpoints, newest first, as the leader sees them: another node
        may see an older state of a shared folder. What a killed process left is mended before."""
        storage = self._saved.storage

        def look() -> list[int]:
            if not self._mesh.is_leader or not (self._config.enable or self._config.load_only):
                return []
            try:
                if self._mends:
                    storage.mend()
                return storage.steps()
            except OSError as error:
                raise CheckpointError(
                    f"{storage.root} cannot be used as the folder of checkpoints: {error} Mend "
                    "it, or set another checkpoint.folder."
                ) from None

        told = leader_says(" ".join(map(str, reversed(together(look)))).encode())
        return list(map(int, told.split()))

    def _newest_first(
        self, steps: Sequence[int], remembered: RememberedSnapshot | None
    ) -> list[_Candidate]:
        """What there is of this run: the stored `steps`, which begin with the newest, and what lies
        in shared memory."""
        found: list[_Candidate] = [(self._saved.storage, step_name(step)) for step in steps]
        if remembered is not None:
            newer = sum(step > remembered.saved.step for step in steps)
            found.insert(newer, remembered)
        return found

    def _load_first_intact(
        self,
        candidates: Sequence[_Candidate],
        parts: set[str],
        accepts: Callable[[SavedValues], bool] = lambda saved: True,
    ) -> Snapshot | None:
        """Load the first candidate that is accepted and that no rank finds damaged. All ranks have
        the same list."""
        damage: list[str] = []
        for candidate in candidates:
            if isinstance(candidate, RememberedSnapshot):
                if not accepts(candidate.saved):
                    continue
                try:
                    self._load(candidate, parts)
                    together(candidate.check)
                except UserError as error:
                    damage.append(
                        f"{error} (`torchtitan-lite inspect --shm --free "
                        f"{self._saved.identity.run_id}` removes it.)"
                    )
                    logger.warning("The snapshot in shared memory is not used: %s", error)
                    continue
                return candidate
            try:
                found = self._open(*candidate)
                if not accepts(found.saved):
                    continue
                self._load(found, parts)
            except DamagedCheckpoint as error:
                damage.append(str(error))
                logger.warning("Skipping a damaged checkpoint: %s", error)
                continue
            return found
        if damage:
            raise DamagedCheckpoint(
                "None of the checkpoints asked for is intact: " + " ".join(damage) + " Delete the "
                "damaged ones, or set another checkpoint.load_step or checkpoint.folder."
            )
        return None

    def _open(self, storage: Storage, name: str) -> Snapshot:
        spec, num_ranks = self._saved.spec, self._mesh.world_size
        return together(lambda: open_snapshot(storage, name, spec, num_ranks=num_ranks))

    def _load(self, snapshot: Snapshot, parts: set[str]) -> None:
        saved = snapshot.saved
        if self._is_the_end(snapshot, parts):
            parts = _OF_THE_END
        elif saved.model_only and parts != {"model"}:
            raise CheckpointError(
                f"{snapshot.where} holds the weights only, so training cannot resume from it. "
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
        """Weights of the same shapes may still be another model's, as with other RoPE scaling. A
        run must not change its own; one that starts from another's may."""
        here = model_dims(self._saved.run_config)
        is_own = snapshot.where.startswith(f"{self._saved.storage.root}/") or isinstance(
            snapshot, RememberedSnapshot
        )
        if is_own and here and not snapshot.saved.dims:
            logger.warning(
                "%s does not record the dimensions of its model: only the shapes of its weights "
                "were compared with [model].",
                snapshot.where,
            )
        differing = differing_dims(snapshot.saved.dims, here)
        if not differing:
            return
        text = f"{snapshot.where} has other model dimensions than [model]: {'; '.join(differing)}."
        if not is_own:
            logger.warning("%s Training starts from its weights with those of [model].", text)
            return
        raise CheckpointError(
            f"{text} Use the [model] section that it was saved with (`config` in its "
            "manifest.json), or start another run from it with checkpoint.initial_load_path."
        )

    def _is_the_end(self, snapshot: Snapshot, parts: set[str]) -> bool:
        """Whether this run has saved the weights of its last step there, and nothing else."""
        saved, last = snapshot.saved, self._saved.last_step
        return (
            saved.model_only
            and last is not None
            and saved.step >= last
            and parts >= _OF_THE_END
            and "train_state" in saved.values
            and snapshot.where.startswith(f"{self._saved.storage.root}/")
        )


def _in(name: str, parts: set[str]) -> bool:
    return name.split(".", 1)[0] in parts
