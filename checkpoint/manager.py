"""When to save, what to resume from, and how many checkpoints stay.

Invariant: the newest complete checkpoint is never deleted, and a damaged one is never loaded.
Layer: above the rest of checkpoint/.
"""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite import rng
from torchtitan_lite.checkpoint.config import CheckpointConfig
from torchtitan_lite.checkpoint.manifest import Manifest, read_manifest, step_folders
from torchtitan_lite.checkpoint.reader import check_fit, fill, read_boxes
from torchtitan_lite.checkpoint.state import PARTS, State
from torchtitan_lite.checkpoint.writer import recover, write_checkpoint
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh


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
        self._config = config
        self._state = state
        self._mesh = mesh
        self._run_config = run_config
        self.root = dump_folder / config.folder
        self._saved_step: int | None = None
        self._saved_values: dict[str, Any] = {}

    def restore(self) -> Path | None:
        """Load what this run starts from, and return its folder; None to start afresh.

        In this order: the checkpoint of `load_step`, the newest intact one of this run,
        `initial_load_path`. Raises CheckpointError when what was asked for is not there or does
        not fit, and when this run has checkpoints but none is intact.
        """
        config = self._config
        if self._saves and self._mesh.is_leader:
            recover(self.root)
        parts = set(PARTS) - set(config.exclude_from_loading)
        steps = self._own_steps()
        if config.load_step >= 0:
            if config.load_step not in steps:
                known = ", ".join(map(str, sorted(steps))) or "none"
                raise CheckpointError(
                    f"checkpoint.load_step = {config.load_step}, but {self.root} holds the steps: "
                    f"{known}."
                )
            steps = [config.load_step]
        candidates = [self.root / f"step-{step}" for step in steps]
        if not candidates and config.initial_load_path is not None:
            candidates = [Path(config.initial_load_path)]
            if config.initial_load_model_only:
                parts &= {"model"}
        loaded = self._load_first_intact(candidates, parts)
        if loaded is not None and loaded.parent == self.root:
            self._saved_step = self._state.step
            self._saved_values = self._state.values()
        return loaded

    def after_step(self) -> float:
        """Save if one is due after the step just committed. Returns the seconds that it took.

        A save that fails is reported and training goes on: the next one may succeed.
        """
        step, config = self._state.step, self._config
        due = step % config.interval == 0 or (step == 1 and config.enable_first_step_checkpoint)
        if not due or not self._saves:
            return 0.0
        started = time.perf_counter()
        try:
            self._save(model_only=False)
        except CheckpointError as error:
            logger.error("%s Training goes on.", error)
        return time.perf_counter() - started

    def final_save(self, *, finished: bool) -> Path | None:
        """Save the last step, unless it is saved already. `finished`: the run is at its end, so
        that `last_save_model_only` applies. Raises CheckpointError when it fails."""
        if not self._saves:
            return None
        model_only = finished and self._config.last_save_model_only
        # A refused step moves the data cursor on and not the step.
        is_saved = self._saved_step == self._state.step and (
            self._saved_values == self._state.values()
        )
        if not is_saved or model_only:
            self._save(model_only=model_only)
        return self.root / f"step-{self._state.step}"

    @property
    def _saves(self) -> bool:
        return self._config.enable and not self._config.load_only

    def _save(self, *, model_only: bool) -> None:
        step = self._state.step
        tensors, values = self._state.tensors(), self._state.values()
        if model_only:
            dtype = getattr(torch, self._config.export_dtype)
            tensors = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
                if name.startswith("model.")
            }
            values = {}
        folder = write_checkpoint(
            self.root,
            step=step,
            tensors=tensors,
            values=values,
            config=self._run_config,
            mesh=self._mesh,
            model_only=model_only,
        )
        self._saved_step = step
        self._saved_values = values
        logger.info("Saved %s", folder)
        self._delete_old()

    def _own_steps(self) -> list[int]:
        """The steps of this run's checkpoints, newest first, as the leader sees them: another node
        may see an older state of a shared folder."""
        looks = self._config.enable or self._config.load_only
        seen = sorted(step_folders(self.root), reverse=True) if looks else []
        number = self._mesh.leader_says(len(seen))
        return [
            self._mesh.leader_says(seen[place] if place < len(seen) else 0)
            for place in range(number)
        ]

    def _load_first_intact(self, candidates: list[Path], parts: set[str]) -> Path | None:
        """Load the first candidate that no rank finds damaged. All ranks have the same list."""
        damage: list[str] = []
        for folder in candidates:
            problem, misfit, found = self._open(folder, parts)
            if self._mesh.any(misfit is not None):
                raise misfit or CheckpointError(f"{folder} does not fit on another rank.")
            if self._mesh.any(problem is not None):
                damage.append(str(problem or f"{folder} is damaged on another rank."))
                logger.warning("Skipping a damaged checkpoint: %s", damage[-1])
                continue
            assert found is not None
            manifest, boxes = found
            self._load(manifest, boxes, parts)
            return folder
        if damage:
            raise DamagedCheckpoint(
                "None of the checkpoints asked for is intact: " + " ".join(damage) + " Delete the "
                "damaged ones, or set another checkpoint.load_step or checkpoint.folder."
            )
        return None

    def _open(
        self, folder: Path, parts: set[str]
    ) -> tuple[
        DamagedCheckpoint | None,
        CheckpointError | None,
        tuple[Manifest, list[tuple[torch.Tensor, torch.Tensor]]] | None,
    ]:
        """(damage, misfit, what was found): exactly one is given. Errors are returned, since all
        ranks must reach the vote."""
        try:
            manifest = read_manifest(folder)
            if manifest.model_only and parts != {"model"}:
                raise CheckpointError(
                    f"{folder} holds the weights only, so training cannot resume from it. Start "
                    "another run with checkpoint.initial_load_path, or delete it to resume from "
                    "an earlier step."
                )
            self._state.allocate(
                {name: tuple(e.shape) for name, e in manifest.tensors.items() if _in(name, parts)}
            )
            tensors = {n: t for n, t in self._state.tensors().items() if _in(n, parts)}
            check_fit(manifest, folder, tensors)
            return None, None, (manifest, read_boxes(manifest, folder, tensors))
        except DamagedCheckpoint as error:
            return error, None, None
        except CheckpointError as error:
            return None, error, None
        except OSError as error:
            return DamagedCheckpoint(f"{folder} cannot be read: {error}"), None, None
        except Exception as error:
            return None, CheckpointError(f"{folder} cannot be loaded: {error!r}"), None

    def _load(
        self,
        manifest: Manifest,
        boxes: list[tuple[torch.Tensor, torch.Tensor]],
        parts: set[str],
    ) -> None:
        fill(boxes)
        self._state.load_values(
            {part: value for part, value in manifest.values.items() if part in parts}
        )
        generators = manifest.rng.get(str(self._mesh.rank))
        if "rng" in parts and generators is not None:
            rng.restore(generators)

    def _delete_old(self) -> None:
        """Keep the newest `keep_latest_k` up to the step just saved: those of later steps are
        damaged or of a run that was taken back, and must not push out what was just written.

        A folder is renamed first, so that one that is half deleted is no checkpoint. What cannot
        be deleted is reported: only the leader is here, so an error would leave the others alone.
        """
        keep, saved_step = self._config.keep_latest_k, self._saved_step
        if keep == 0 or saved_step is None or not self._mesh.is_leader:
            return
        try:
            for left in self.root.glob(".deleting-*"):
                shutil.rmtree(left)
            own = [folder for step, folder in step_folders(self.root).items() if step <= saved_step]
            for folder in own[:-keep]:
                doomed = folder.with_name(f".deleting-{folder.name}")
                os.rename(folder, doomed)
                shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("Old checkpoints in %s could not be deleted: %s", self.root, error)


def _in(name: str, parts: set[str]) -> bool:
    return name.split(".", 1)[0] in parts
