"""When to save, and what to resume from.

Invariant: the newest complete checkpoint is never deleted, and a damaged one is never loaded.
Layer: above the rest of checkpoint/.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite import rng
from torchtitan_lite.checkpoint.asynchronous import AsynchronousSaver, open_saver
from torchtitan_lite.checkpoint.config import CheckpointConfig
from torchtitan_lite.checkpoint.foreign import refuse_foreign
from torchtitan_lite.checkpoint.identity import identify
from torchtitan_lite.checkpoint.loader import load
from torchtitan_lite.checkpoint.memory.folder import remove_regions
from torchtitan_lite.checkpoint.outcome import Signals
from torchtitan_lite.checkpoint.remembered import newest_remembered
from torchtitan_lite.checkpoint.retries import Retries
from torchtitan_lite.checkpoint.saving import Saved, attempt
from torchtitan_lite.checkpoint.snapshots import RememberedSnapshot, Snapshot, StoredSnapshot
from torchtitan_lite.checkpoint.state import PARTS, State
from torchtitan_lite.checkpoint.storage.names import step_name
from torchtitan_lite.checkpoint.storage.storage import Storage, open_storage, split_storage
from torchtitan_lite.checkpoint.synchronous import save_now
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, UserError
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.messages import gather_texts, leader_says


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
    ) -> None:
        self._config, self._state, self._mesh = config, state, mesh
        folder = config.folder
        self.root = folder if "://" in folder else str(dump_folder / folder)
        self._saved = Saved(
            config=config,
            state=state,
            mesh=mesh,
            storage=open_storage(self.root),
            identity=identify(dump_folder, mesh),
            run_config=run_config,
        )
        self._asynchronous: AsynchronousSaver | None = None
        self._may_be_asynchronous = self._saves and config.async_mode != "disabled"
        self._restored_step: int | None = None
        self._saved_step: int | None = None
        self._saved_values: dict[str, Any] = {}
        self._saves_tried = 0
        self._retries = Retries()
        self._step_ended = time.perf_counter()

    def restore(self) -> str | None:
        """Load what this run starts from, and return where it lay; None to start afresh.

        In this order: the checkpoint of `load_step`; the newest intact state of this run, in shared
        memory or stored; `initial_load_path`. Raises CheckpointError when what was asked for is not
        there or does not fit, and when this run has checkpoints but none is intact.
        """
        config = self._config
        parts = set(PARTS) - set(config.exclude_from_loading)
        steps = self._stored_steps()
        remembered = None
        if config.load_step >= 0:
            if config.load_step not in steps:
                known = ", ".join(map(str, sorted(steps))) or "none"
                raise CheckpointError(
                    f"checkpoint.load_step = {config.load_step}, but {self.root} holds the steps: "
                    f"{known}."
                )
            steps = [config.load_step]
        elif self._may_be_asynchronous:
            remembered = newest_remembered(self._saved.identity.run_id, self._mesh.rank)
        storage = self._saved.storage
        candidates: list[RememberedSnapshot | tuple[Storage, str]] = [
            (storage, step_name(step)) for step in steps
        ]
        if remembered is not None:
            newer = sum(step > remembered.saved.step for step in steps)
            candidates.insert(newer, remembered)
        if not candidates and config.initial_load_path is not None:
            storage, name = split_storage(config.initial_load_path)
            candidates = [(storage, name)]
            if config.initial_load_model_only:
                parts &= {"model"}
        try:
            where = self._load_first_intact(candidates, parts)
        finally:
            # A file that is mapped keeps its place on the disk when it is deleted.
            storage.close()
            if remembered is not None:
                remembered.close()
        if where is not None and steps and self._restored_step is None:
            self._saved_step = self._state.step
            self._saved_values = self._state.values()
        return where

    def counted(self, device: torch.device) -> torch.Tensor:
        """What this rank adds to the step's exchange of numbers: float64, `NUM_SIGNALS` of them.
        Comes back when the state may change."""
        step_s = time.perf_counter() - self._step_ended
        saver = self._asynchronous
        signals = Signals() if saver is None else saver.signals(step_s)
        return torch.tensor(signals.numbers(), dtype=torch.float64).to(device, non_blocking=True)

    def settle(self, sums: torch.Tensor) -> None:
        """Act on `counted`, summed over all ranks."""
        if self._asynchronous is not None:
            self._asynchronous.settle(Signals(*sums.tolist()))

    def after_step(self) -> float:
        """Save what is due after the step just committed. Returns the seconds that it took.

        A save that fails is reported and training goes on: it is tried again.
        """
        started = time.perf_counter()
        step, config = self._state.step, self._config
        due = step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)
        if self._may_be_asynchronous and self._asynchronous is None:
            self._asynchronous = open_saver(self._saved, self._restored_step)
            self._may_be_asynchronous = self._asynchronous is not None
        if self._asynchronous is not None:
            self._asynchronous.after_step(save_due=due)
        elif self._saves and (due or (self.failures_in_a_row and self._retries.may_try(step))):
            try:
                self._save_now()
                self._retries.succeeded()
            except CheckpointError as error:
                self._retries.failed(step)
                logger.error("%s Training goes on.", error)
        self._step_ended = time.perf_counter()
        return self._step_ended - started

    def wait_for_saves(self) -> None:
        """Come back when no save is under way. Every rank must call it."""
        if self._asynchronous is not None:
            self._asynchronous.wait()

    @property
    def failures_in_a_row(self) -> int:
        """Saves that could not be written, one after the other."""
        saver = self._asynchronous
        return (self._retries if saver is None else saver).failures_in_a_row

    def final_save(self, *, finished: bool) -> str | None:
        """Save the last step, unless it is saved already, and come back when it is durable.
        `finished`: the run is at its end, so that `last_save_model_only` applies. Raises
        CheckpointError when it fails."""
        if not self._saves:
            return None
        model_only = finished and self._config.last_save_model_only
        saver = self._asynchronous
        if saver is not None:
            self._saved_step, self._saved_values = saver.saved_step, saver.saved_values
        # A refused step moves the data cursor on and not the step.
        is_saved = self._saved_step == self._state.step and (
            self._saved_values == self._state.values()
        )
        if model_only:
            self.wait_for_saves()
            self._save_now(model_only=True)
        elif not is_saved and saver is not None:
            saver.finish()
            self._saved_step, self._saved_values = saver.saved_step, saver.saved_values
        elif not is_saved:
            self._save_now()
        if saver is not None:
            saver.close(free=True)
            self._asynchronous = None
        elif self._restored_step is not None:
            # No step was taken since, so nobody took the memory over.
            remove_regions(self._saved.identity.run_id)
        return f"{self.root}/{step_name(self._state.step)}"

    def close(self) -> None:
        """Let go of a run that did not come to its final save: its newest snapshot is written."""
        if self._asynchronous is not None:
            self._asynchronous.close(free=False)
            self._asynchronous = None
        self._saved.storage.close()

    @property
    def _saves(self) -> bool:
        return self._config.enable and not self._config.load_only

    def _save_now(self, *, model_only: bool = False) -> None:
        self._saves_tried += 1
        if self._saves_tried == 1 and self._mesh.is_leader:
            # Nobody writes beside this process: what is left of others can go.
            attempt(lambda: self._saved.storage.recover(self._saved.identity.session))
        # Told from the attempts of the writer, which count from 1.
        save_now(self._saved, number=-self._saves_tried, model_only=model_only)
        self._saved_step, self._saved_values = self._state.step, self._state.values()
        logger.info("Saved step %d in %s", self._state.step, self.root)

    def _stored_steps(self) -> list[int]:
        """The steps of this run's checkpoints, newest first, as the leader sees them: another node
        may see an older state of a shared folder. What a killed process left is mended before."""
        seen: list[int] = []
        error = None
        if self._mesh.is_leader and (self._config.enable or self._config.load_only):
            storage = self._saved.storage
            try:
                if self._saves:
                    storage.mend()
                seen = storage.steps()
            except OSError as caught:
                error = CheckpointError(
                    f"{self.root} cannot be used as the folder of checkpoints: {caught} Mend it, "
                    "or set another checkpoint.folder."
                )
        self._agree(error)
        told = leader_says(" ".join(map(str, reversed(seen))).encode())
        return list(map(int, told.split()))

    def _load_first_intact(
        self, candidates: list[RememberedSnapshot | tuple[Storage, str]], parts: set[str]
    ) -> str | None:
        """Load the first candidate that no rank finds damaged. All ranks have the same list."""
        damage: list[str] = []
        for candidate in candidates:
            if isinstance(candidate, RememberedSnapshot):
                try:
                    self._load(candidate, parts)
                except UserError as error:
                    damage.append(
                        f"{error} (`python -m scripts.inspect_checkpoint --shm --free "
                        f"{self._saved.identity.run_id}` removes it.)"
                    )
                    logger.warning("The snapshot in shared memory is not used: %s", error)
                    continue
                self._restored_step = candidate.saved.step
                return candidate.where
            try:
                found = self._open(*candidate)
                self._load(found, parts)
            except DamagedCheckpoint as error:
                damage.append(str(error))
                logger.warning("Skipping a damaged checkpoint: %s", error)
                continue
            return found.where
        if damage:
            raise DamagedCheckpoint(
                "None of the checkpoints asked for is intact: " + " ".join(damage) + " Delete the "
                "damaged ones, or set another checkpoint.load_step or checkpoint.folder."
            )
        return None

    def _open(self, storage: Storage, name: str) -> StoredSnapshot:
        """Raises on all ranks what one of them meets."""
        found, error = None, None
        try:
            refuse_foreign(storage, name)
            found = StoredSnapshot(storage, name)
        except (CheckpointError, OSError) as caught:
            error = caught
        self._agree(error)
        assert found is not None
        return found

    def _load(self, snapshot: Snapshot, parts: set[str]) -> None:
        saved = snapshot.saved
        if saved.model_only and parts != {"model"}:
            raise CheckpointError(
                f"{snapshot.where} holds the weights only, so training cannot resume from it. "
                "Start another run with checkpoint.initial_load_path, or delete it to resume from "
                "an earlier step."
            )
        names = {name: p.shape for name, p in snapshot.tensors.items() if _in(name, parts)}
        self._state.allocate(names)
        tensors = {name: t for name, t in self._state.tensors().items() if _in(name, parts)}
        load(snapshot, tensors, parts, self._mesh)
        self._state.load_values({part: v for part, v in saved.values.items() if part in parts})
        generators = saved.rng.get(str(self._mesh.rank))
        if "rng" in parts and generators is not None:
            rng.restore(dict(generators))

    def _agree(self, error: Exception | None) -> None:
        """Raise where a rank has met an error: damage as damage, all else as a misfit."""
        kinds = {"damage": DamagedCheckpoint, "misfit": CheckpointError}
        told = ""
        if error is not None:
            is_misfit = isinstance(error, CheckpointError) and not isinstance(
                error, DamagedCheckpoint
            )
            told = f"{'misfit' if is_misfit else 'damage'} {error}"
        for text in gather_texts(told.encode()):
            if text:
                kind, _, message = text.decode().partition(" ")
                raise kinds[kind](message)


def _in(name: str, parts: set[str]) -> bool:
    return name.split(".", 1)[0] in parts
