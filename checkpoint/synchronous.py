"""Saves while training waits: where asynchronous saving is off or has no memory, and of the weights
alone. Layer: above saving and background.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torchtitan_lite.checkpoint.background.save import (
    attempt_token,
    commit_parts,
    delete_old,
    part_of,
    write_boxes,
)
from torchtitan_lite.checkpoint.inventory import local_parts, take_inventory
from torchtitan_lite.checkpoint.outcome import Signals
from torchtitan_lite.checkpoint.retries import Retries
from torchtitan_lite.checkpoint.saving import Saved, attempt
from torchtitan_lite.checkpoint.tensor_bytes import bytes_of
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger


class SynchronousSaver:
    """Writes the state itself. Every rank calls every method; only old checkpoints are deleted
    beside training."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._attempts = 0
        self._retries = Retries()
        self._deletions = ThreadPoolExecutor(1, "checkpoint-deletion")
        self.saved_step: int | None = None
        self.saved_values: dict[str, Any] = {}

    def knows(self, step: int, values: dict[str, Any]) -> None:
        """A step is saved, with these values, by whomever."""
        self.saved_step, self.saved_values = step, values

    @property
    def failures_in_a_row(self) -> int:
        """Saves that could not be written, one after the other."""
        return self._retries.failures_in_a_row

    def signals(self, step_s: float) -> Signals:
        """Nothing: what ranks must agree on, they tell each other in `save`."""
        del step_s
        return Signals()

    def settle(self, all_ranks: Signals) -> None:
        """Nothing is under way."""

    def after_step(self, *, save_due: bool) -> None:
        """Save if it is due, or if one that failed may be tried again."""
        step = self._saved.state.step
        if save_due or (self.failures_in_a_row and self._retries.may_try(step)):
            try:
                self.save()
                self._retries.succeeded()
            except CheckpointError as error:
                self._retries.failed(step)
                logger.error("%s Training goes on.", error)

    def wait(self) -> None:
        """Come back when what was to be deleted is deleted: nothing else is under way."""
        self._deletions.submit(lambda: None).result()

    def finish(self) -> None:
        """Save the present step. Raises CheckpointError."""
        self.save()

    def save(self, *, model_only: bool = False) -> None:
        """Save the present step durably, in place of one of the same step.

        Raises CheckpointError on all ranks when one of them cannot write; what was written so far
        is removed, and older checkpoints stay as they are.
        """
        saved, state = self._saved, self._saved.state
        mesh, storage, step = saved.mesh, saved.storage, state.step
        self._attempts += 1
        if self._attempts == 1 and mesh.is_leader:
            # Nobody writes beside this process: what is left of others can go.
            attempt(lambda: storage.recover(saved.identity.session))
        tensors, values = state.tensors(), saved.values()
        step_values = values["values"]
        if model_only:
            dtype = getattr(torch, saved.config.export_dtype)
            tensors = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor
                for name, tensor in tensors.items()
                if name.startswith("model.")
            }
            values = {"values": {}, "rng": {}, "model_only": True}
        inventory = take_inventory(tensors, mesh)
        about = saved.describe(inventory)
        # Told from the attempts of the writer, which count from 1.
        token = attempt_token(about, -self._attempts)

        def write() -> None:
            parts = local_parts(tensors)
            held = {name: bytes_of(part) for name, part in parts.items()}
            views = [
                held[box.tensor][box.start - inventory.starts[box.tensor] :][: box.bytes]
                for box in about.boxes
            ]
            written = write_boxes(storage, about, step, token, views)
            storage.put_part(step, token, mesh.rank, part_of(about, step, values, written))

        problem = attempt(write)
        if not mesh.any(problem is not None) and mesh.is_leader:
            problem = attempt(lambda: commit_parts(storage, about, step, token))
        if mesh.any(problem is not None):
            if mesh.is_leader:
                attempt(lambda: storage.abandon(step, token))
            cause = problem or "another rank could not write"
            raise CheckpointError(f"Step {step} was not saved in {storage.root}: {cause}")
        self.knows(step, step_values)
        logger.info("Saved step %d in %s", step, storage.root)
        if mesh.is_leader:
            config = saved.config
            self._deletions.submit(
                delete_old,
                storage,
                step,
                keep_latest_k=config.keep_latest_k,
                keep_every=config.keep_every,
            )

    def close(self) -> None:
        """Come back when what was to be deleted is deleted."""
        self._deletions.shutdown()
