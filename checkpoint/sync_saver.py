"""Synchronous checkpointing: used if asynchronous saving is off or out of memory, and for
model-only saves."""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from torchtitan_lite.checkpoint.background.save import (
    SINGLE_REPLICA,
    WriterGroup,
    commit_parts,
    delete_old_checkpoints,
    part_json,
    rank_share,
    write_boxes,
)
from torchtitan_lite.checkpoint.leftover_snapshots import SnapshotOrigin
from torchtitan_lite.checkpoint.save_context import (
    AttemptTokens,
    RetryBackoff,
    SaveContext,
    SaveSignals,
    capture_error,
)
from torchtitan_lite.checkpoint.save_plan import plan_save
from torchtitan_lite.checkpoint.shared_memory.description import RegionDescription
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.attempts import Announcements
from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.checkpoint.tensors import (
    byte_pieces,
    local_tensors,
    overflows,
    tensor_bytes,
)
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import wait_for_outputs

_PATIENCE_S = 60.0
"""Seconds that the leader waits for the parts of other replicas, during which the others wait for
it."""
_POLL_S = 0.02
_HEARTBEAT_S = 1.0


class SynchronousSaver:
    """Writes the state while training waits. Every rank calls every method; only old checkpoints
    are deleted in the background."""

    def __init__(self, context: SaveContext) -> None:
        self._context = context
        self._writer_group = SINGLE_REPLICA
        # Distinguishes these attempts from those of the writer process.
        self._tokens = AttemptTokens(f"{context.identity.generation_id}s")
        self._outcome = ""
        self._is_first = True
        self._backoff = RetryBackoff()
        self._work = ThreadPoolExecutor(1, "checkpoint-save")
        self._deletions = ThreadPoolExecutor(1, "checkpoint-deletion")
        self.saved_step: int | None = None
        self.saved_values: dict[str, Any] = {}

    def record_saved(self, step: int, values: dict[str, Any]) -> None:
        """Record that a step is saved with these values, by any process."""
        self.saved_step, self.saved_values = step, values

    @property
    def consecutive_failures(self) -> int:
        """Consecutive failed saves."""
        return self._backoff.consecutive_failures

    def set_writer_group(self, writer_group: WriterGroup) -> None:
        """Set the replicas that write with this one."""
        self._writer_group = writer_group

    def wait_for_snapshot(self) -> None:
        """Return at once: there is no snapshot in progress."""

    def rewind_to(self, origin: SnapshotOrigin | None) -> None:
        """Do nothing: no snapshot is in memory, and no save is in progress."""

    def local_signals(self, step_s: float) -> SaveSignals:
        """Return the outcome of the last save, for replicas of the group that save
        asynchronously."""
        step = self._context.state.step
        save_pending = self.consecutive_failures > 0 and self._backoff.may_retry(step + 1)
        committed, failed = float(self._outcome == "committed"), float(self._outcome == "failed")
        return SaveSignals(
            failed=failed, committed=committed, save_pending=float(save_pending), step_s=step_s
        )

    def apply_signals(self, all_ranks: SaveSignals) -> None:
        """Clear the outcome: all ranks know it."""
        del all_ranks
        self._outcome = ""

    def after_step(self, *, save_due: bool) -> None:
        """Save if `save_due`, which must be equal on all ranks and replicas of the group."""
        if not save_due:
            return
        try:
            self.save()
            self._backoff.succeeded()
        except CheckpointError as error:
            self._backoff.failed(self._context.state.step)
            logger.error("%s Training continues.", error)

    def wait(self) -> None:
        """Block until old checkpoints are deleted; nothing else runs in the background."""
        self._deletions.submit(lambda: None).result()

    def finish(self) -> None:
        """Save the current step. Raises CheckpointError."""
        self.save()

    def save(self, *, model_only: bool = False) -> None:
        """Save the current step durably, replacing a checkpoint of the same step.

        Raises CheckpointError on all ranks if one of them cannot write; its files are removed, and
        older checkpoints are unaffected.
        """
        wait_for_outputs()
        context, state = self._context, self._context.state
        mesh, storage, step = context.mesh, context.storage, state.step
        if self._is_first and mesh.is_leader and not context.is_shared:
            # No other process writes here, so leftovers of earlier ones can be removed.
            capture_error(lambda: attempts.recover(storage, context.identity.generation_id))
        self._is_first = False
        values = context.values()
        step_values = values["values"]
        if model_only:
            # A restarted run reads from them that it is complete.
            values = {"train_state": step_values["train_state"]}
            values = {"values": values, "rng": {}, "model_only": True}
        writer_group = SINGLE_REPLICA if model_only else self._writer_group
        token = self._tokens.next(writer_group, step)
        committed: RegionDescription | None = None

        def write() -> None:
            nonlocal committed
            tensors = state.tensors()
            if model_only:
                tensors = _weights(tensors, context.config.export_dtype)
            plan = plan_save(tensors, mesh)
            about = rank_share(context.describe(plan), writer_group)
            parts = local_tensors(tensors)
            ranges = [
                (parts[box.tensor], box.start - plan.starts[box.tensor], box.bytes)
                for box in about.boxes
            ]
            source = (
                [tensor_bytes(part)[start:][:length] for part, start, length in ranges]
                if _are_on_cpu(parts.values())
                # A few MiB of the state at a time, because a GPU's may not fit into host memory.
                else lambda: (byte_pieces(*range_) for range_ in ranges)
            )
            written = write_boxes(storage, about, step, token, source)
            announced = values if writer_group.index == 0 else {}
            part = part_json(about, step, announced, written)
            attempts.put_part(storage, step, token, about.rank, part)
            if about.is_leader:
                committed = about

        def commit() -> None:
            if committed is not None:
                announced = _wait_for_parts(storage, committed, step, token)
                self._writer_group.check(context.fencing_tokens, context.leases)
                commit_parts(storage, committed, step, token, announced)

        failed, problem = self._together(write)
        if not failed:
            failed, problem = self._together(commit)
        leads = mesh.is_leader and writer_group.index == 0
        self._outcome = "failed" if failed else "committed" if writer_group.index == 0 else ""
        if failed:
            if leads:
                capture_error(lambda: attempts.abandon(storage, step, token))
            cause = problem or "another rank could not write"
            raise CheckpointError(f"Step {step} was not saved in {storage.root}: {cause}")
        self.record_saved(step, step_values)
        logger.info("Saved step %d in %s", step, storage.root)
        if leads:
            config = context.config
            self._deletions.submit(
                delete_old_checkpoints,
                storage,
                step,
                keep_latest_k=config.keep_latest_k,
                keep_every=config.keep_every,
            )

    def _together(self, action: Callable[[], None]) -> tuple[bool, str | None]:
        """Run `action`, which contains no collective, and return whether it failed on any rank and
        the error of this one. The ranks keep exchanging signals, so a slow storage is not mistaken
        for a hang."""
        running = self._work.submit(capture_error, action)
        while True:
            wait([running], timeout=_HEARTBEAT_S)
            is_done = running.done()
            problem = running.result() if is_done else None
            flags = [float(not is_done), float(problem is not None)]
            under_way, failed = self._context.mesh.all_reduce_numbers(flags)
            if not under_way:
                return failed > 0, problem

    def close(self) -> None:
        """Block until old checkpoints are deleted."""
        self._work.shutdown()
        self._deletions.shutdown()


def _are_on_cpu(tensors: Iterable[torch.Tensor]) -> bool:
    return all(tensor.is_cpu for tensor in tensors)


@torch.no_grad()
def _weights(tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Return the model's tensors in the export dtype. Raises CheckpointError if one of their values
    overflows."""
    exported_tensors = {}
    for name, tensor in tensors.items():
        if name.startswith("model."):
            exported = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            before, after = local_tensors({"before": tensor, "after": exported}).values()
            if overflows(before, after):
                raise CheckpointError(
                    f"{name} has values that overflow {dtype}: set checkpoint.export_dtype = "
                    '"bfloat16" or "float32".'
                )
            exported_tensors[name] = exported
    return exported_tensors


def _wait_for_parts(
    storage: Storage, about: RegionDescription, step: int, token: str
) -> Announcements:
    """Wait for the parts of the other replicas, and return all. Raises CheckpointError if one of
    them fails, or is not done within a minute."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        announced = attempts.announcements(storage, step, token)
        if len(announced.parts) == about.world_size:
            return announced
        if failures := attempts.read_failures(storage, announced):
            writer, error = min(failures.items())
            raise CheckpointError(f"writer {writer}: {error}")
        if time.monotonic() >= deadline:
            missing = sorted(set(range(about.world_size)) - set(announced.parts))
            raise CheckpointError(f"writers {missing} did not write their parts")
        time.sleep(_POLL_S)
