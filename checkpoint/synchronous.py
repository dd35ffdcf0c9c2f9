"""Saves while training waits: where asynchronous saving is off or has no memory, and of the weights
alone. Layer: above saving and background.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from torchtitan_lite.checkpoint.background.coworkers import ALONE, Coworkers, share_of
from torchtitan_lite.checkpoint.background.save import (
    commit_parts,
    delete_old,
    part_of,
    write_boxes,
)
from torchtitan_lite.checkpoint.inventory import local_parts, take_inventory
from torchtitan_lite.checkpoint.memory.description import Description
from torchtitan_lite.checkpoint.outcome import Signals
from torchtitan_lite.checkpoint.retries import Retries
from torchtitan_lite.checkpoint.saving import Attempts, Saved, attempt
from torchtitan_lite.checkpoint.snapshots import Origin
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.checkpoint.tensor_bytes import bytes_of, overflows
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger

_PATIENCE_S = 60.0
"""Of the leader, for parts of other replicas: while it waits, the others wait for it."""
_POLL_S = 0.02
_HEARTBEAT_S = 1.0


class SynchronousSaver:
    """Writes the state itself. Every rank calls every method; only old checkpoints are deleted
    beside training."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._coworkers = ALONE
        # Told from the attempts of the writer.
        self._attempts = Attempts(f"{saved.identity.session}s")
        self._outcome = ""
        self._is_first = True
        self._retries = Retries()
        self._work = ThreadPoolExecutor(1, "checkpoint-save")
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

    def join(self, coworkers: Coworkers) -> None:
        """Who writes with this replica from here on."""
        self._coworkers = coworkers

    def hold_still(self) -> None:
        """No snapshot is under way."""

    def take_back(self, origin: Origin | None) -> None:
        """Nothing lies in memory, and no save is under way."""

    def signals(self, step_s: float) -> Signals:
        """The outcome of a save, for coworkers that write beside training."""
        step = self._saved.state.step
        wants = self.failures_in_a_row > 0 and self._retries.may_try(step + 1)
        committed, failed = float(self._outcome == "committed"), float(self._outcome == "failed")
        return Signals(failed=failed, committed=committed, wants=float(wants), step_s=step_s)

    def settle(self, all_ranks: Signals) -> None:
        """All know the outcome."""
        del all_ranks
        self._outcome = ""

    def after_step(self, *, save_due: bool) -> None:
        """Save, if all ranks and coworkers say that it is due."""
        if not save_due:
            return
        try:
            self.save()
            self._retries.succeeded()
        except CheckpointError as error:
            self._retries.failed(self._saved.state.step)
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
        if self._is_first and mesh.is_leader and not saved.is_shared:
            # Nobody writes beside this process: what is left of others can go.
            attempt(lambda: storage.recover(saved.identity.session))
        self._is_first = False
        values = saved.values()
        step_values = values["values"]
        if model_only:
            # By which a run that is started again finds itself at its end.
            values = {"train_state": step_values["train_state"]}
            values = {"values": values, "rng": {}, "model_only": True}
        coworkers = ALONE if model_only else self._coworkers
        token = self._attempts.next(coworkers, step)
        committed: Description | None = None

        def write() -> None:
            nonlocal committed
            tensors = state.tensors()
            if model_only:
                tensors = _weights(tensors, saved.config.export_dtype)
            inventory = take_inventory(tensors, mesh)
            about = share_of(saved.describe(inventory), coworkers)
            parts = local_parts(tensors)
            held = {name: bytes_of(part) for name, part in parts.items()}
            views = [
                held[box.tensor][box.start - inventory.starts[box.tensor] :][: box.bytes]
                for box in about.boxes
            ]
            written = write_boxes(storage, about, step, token, views)
            told = values if coworkers.index == 0 else {}
            storage.put_part(step, token, about.rank, part_of(about, step, told, written))
            if about.is_leader:
                committed = about

        def commit() -> None:
            if committed is not None:
                _wait_for_parts(storage, committed, step, token)
                commit_parts(storage, committed, step, token)

        failed, problem = self._together(write)
        if not failed:
            failed, problem = self._together(commit)
        leads = mesh.is_leader and coworkers.index == 0
        self._outcome = "failed" if failed else "committed" if coworkers.index == 0 else ""
        if failed:
            if leads:
                attempt(lambda: storage.abandon(step, token))
            cause = problem or "another rank could not write"
            raise CheckpointError(f"Step {step} was not saved in {storage.root}: {cause}")
        self.knows(step, step_values)
        logger.info("Saved step %d in %s", step, storage.root)
        if leads:
            config = saved.config
            self._deletions.submit(
                delete_old,
                storage,
                step,
                keep_latest_k=config.keep_latest_k,
                keep_every=config.keep_every,
            )

    def _together(self, action: Callable[[], None]) -> tuple[bool, str | None]:
        """Whether `action`, which has no collective, fails on some rank, and why on this one. The
        ranks stay in touch meanwhile, so that a slow storage does not look like a rank that
        hangs."""
        running = self._work.submit(attempt, action)
        while True:
            wait([running], timeout=_HEARTBEAT_S)
            is_done = running.done()
            problem = running.result() if is_done else None
            said = [float(not is_done), float(problem is not None)]
            under_way, failed = self._saved.mesh.sum_of(said)
            if not under_way:
                return failed > 0, problem

    def close(self) -> None:
        """Come back when what was to be deleted is deleted."""
        self._work.shutdown()
        self._deletions.shutdown()


@torch.no_grad()
def _weights(tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """The model's, in the dtype of the export. Raises CheckpointError where that cannot hold one of
    their numbers."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            exported = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            before, after = local_parts({"before": tensor, "after": exported}).values()
            if overflows(before, after):
                raise CheckpointError(
                    f"{name} has numbers that {dtype} cannot hold: set checkpoint.export_dtype = "
                    '"bfloat16" or "float32".'
                )
            found[name] = exported
    return found


def _wait_for_parts(storage: Storage, about: Description, step: int, token: str) -> None:
    """Coworkers write theirs at the same time. Raises CheckpointError when one cannot, or does not
    in a minute."""
    deadline = time.monotonic() + _PATIENCE_S
    while len(present := storage.parts_present(step, token)) < about.world_size:
        if failures := storage.failures(step, token):
            writer, error = min(failures.items())
            raise CheckpointError(f"writer {writer}: {error}")
        if time.monotonic() >= deadline:
            missing = sorted(set(range(about.world_size)) - present)
            raise CheckpointError(f"writers {missing} did not write their parts")
        time.sleep(_POLL_S)
