"""The writer's main loop: executes orders one by one, and commits as the leader once all parts are
present.

Invariant: a failed save is reported and removed, and ends neither the writer nor the training.
"""

import ctypes
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.background.channel import WriterChannel, WriterSettings
from torchtitan_lite.checkpoint.background.flush import (
    GracePeriod,
    GracePeriodExpired,
    VisibleRanks,
    flush,
    read_decision,
)
from torchtitan_lite.checkpoint.background.save import (
    SINGLE_REPLICA,
    RankSave,
    WriterGroup,
    attempt_token,
    delete_old_checkpoints,
    log_to_stderr,
)
from torchtitan_lite.checkpoint.history.fencing_tokens import FencingTokens
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.checkpoint.storage.safetensors_file import TokenBucket
from torchtitan_lite.core.errors import CheckpointError, WriteAbandoned
from torchtitan_lite.core.output_fence import allow_outputs, withholds_outputs

_WAITING_S = 0.05
_IDLE_S = 0.2
_RETRY_S = 0.5
_PATIENCE = 3
"""Fraction (1/n) of the grace period in which a stopping trainer saves its last step itself."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS = 1
_CLASS_SHIFT = 13
_CLASS_IDLE = 3
_CLASS_BEST_EFFORT = 2
_BEST_EFFORT_NORMAL = 4


@dataclass(frozen=True)
class _OrderedSave:
    """An attempt at a step by this rank and its group."""

    save: RankSave
    step: int
    token: str
    deadline: float
    """When the leader stops waiting for the other parts."""
    is_joint: bool
    """Whether several replicas write it."""


class Writer:
    """Executes the orders of one rank's trainer, and flushes after its death."""

    def __init__(self, save: RankSave, settings: WriterSettings, channel: WriterChannel) -> None:
        self._save, self._settings, self._channel = save, settings, channel
        self._storage: Storage = save.storage
        if settings.shared_run_folder:
            save.fencing_tokens = FencingTokens(Path(settings.shared_run_folder), settings.replica)
        save.leases = tuple(settings.leases)
        self._rate = TokenBucket(settings.bytes_per_s)
        self._ranks = VisibleRanks(save)
        self._pending: dict[str, _OrderedSave] = {}
        """Attempts by token that the leader has not committed yet."""
        self._writing: _OrderedSave | None = None
        self._followed_decision = False
        self._stop_requested_at: float | None = None
        self._handled_requests: set[int] = set()
        self._retry_at = 0.0
        """When work without an order may be retried."""

    def run(self) -> None:
        """Work until the trainer stops or dies, and finish saves in progress."""
        if not self._may_ever_write():
            return
        if self._save.about.is_leader and self._settings.recovers:
            try:
                attempts.recover(self._storage, self._save.about.generation_id)
            except OSError as error:
                log_to_stderr(f"Leftovers in {self._storage.root} could not be removed: {error}")
        self._channel.send(ready=os.getpid())
        while True:
            orders = self._channel.poll(_WAITING_S if self._pending else _IDLE_S)
            if orders:
                order = orders.pop(0)
                if "stop" in order:
                    self._finish(free=bool(order.get("free")))
                    return
                self._carry_out(order)
            elif self._channel.ended:
                self._flush()
                return
            self._commit_complete()
            self._act_without_orders()

    def _may_ever_write(self) -> bool:
        """Wait until outputs are allowed. Return False if the trainer stops or dies before: its
        snapshots stay in shared memory, from which the next generation resumes."""
        while withholds_outputs():
            orders = self._channel.poll(_IDLE_S)
            if any("outputs" in order for order in orders):
                allow_outputs()
            elif self._channel.ended:
                return False
            elif any("stop" in order for order in orders):
                self._finish(free=any(order.get("free") for order in orders))
                return False
        return True

    def _carry_out(self, order: dict[str, Any]) -> None:
        if "save" in order:
            save = order["save"]
            if save.get("urgent"):
                self._remove_limits()
            # The order proves that the trainer does not hang.
            self._channel.stop_requested, self._stop_requested_at = False, None
            writer_group = (
                WriterGroup.from_json(save["writer_group"])
                if "writer_group" in save
                else SINGLE_REPLICA
            )
            self._save.writer_group = writer_group.alone
            step = int(save["step"])
            token = save.get("token") or attempt_token(self._save.about.generation_id, step)
            self._write(int(save["slot"]), step, str(token), writer_group)
        elif "writer_group" in order:
            # For what is written without an order, such as the flush after the trainer's death.
            self._save.writer_group = WriterGroup.from_json(order["writer_group"]).alone
        elif "outputs" in order:
            # They are allowed already.
            pass
        elif "abandon" in order:
            step, token = int(order["abandon"]), None
            for attempt in [a for a in self._pending.values() if a.step == step]:
                token = attempt.token
                del self._pending[token]
                self._remove(attempt)
            self._channel.send(abandoned=step, token=token)
        else:
            self._channel.send(failed=-1, error=f"Unknown order: {order}")

    def _write(self, slot: int, step: int, token: str, writer_group: WriterGroup) -> None:
        """Write this rank's part; the leader then waits for the others."""
        attempt = self._attempt(step, token, writer_group)
        self._writing = attempt
        started_s = time.monotonic()
        try:
            attempt.save.write(
                slot,
                step,
                token,
                direct=self._settings.direct_io,
                rate=self._rate,
                tick=self._tick,
            )
        except WriteAbandoned as end:
            self._remove(attempt)
            if isinstance(end, GracePeriodExpired):
                log_to_stderr(
                    f"The save of step {step} by rank {attempt.save.about.rank} ends: {end}"
                )
            self._channel.send(abandoned=step, token=token)
            return
        except Exception as error:
            # Training continues after any error, and the next save may succeed.
            self._fail(attempt, f"{type(error).__name__}: {error}")
            return
        finally:
            self._writing = None
        num_bytes = sum(box.bytes for box in attempt.save.about.boxes)
        self._is_written(attempt, seconds=time.monotonic() - started_s, bytes=num_bytes)

    def _attempt(
        self, step: int, token: str, writer_group: WriterGroup | None = None
    ) -> _OrderedSave:
        """Return an attempt of `writer_group`; if omitted, of this replica alone."""
        deadline = time.monotonic() + self._settings.commit_timeout_s
        writer_group = writer_group or self._save.writer_group
        save = self._save.for_group(writer_group)
        return _OrderedSave(save, step, token, deadline, is_joint=writer_group.count > 1)

    def _is_written(self, attempt: _OrderedSave, **measured: float) -> None:
        self._channel.send(written=attempt.step, token=attempt.token, **measured)
        if attempt.save.about.is_leader:
            self._pending[attempt.token] = attempt
            self._commit_complete()

    def _fail(self, attempt: _OrderedSave, error: str) -> None:
        """Report a failure to the trainer and the other ranks; the leader removes what was
        written."""
        about, step = attempt.save.about, attempt.step
        if about.is_leader:
            self._pending.pop(attempt.token, None)
            self._remove(attempt)
        else:
            try:
                attempts.put_failure(self._storage, step, attempt.token, about.rank, error)
            except OSError as second:
                log_to_stderr(f"Rank {about.rank} could not announce its failure: {second}")
        self._channel.send(failed=step, token=attempt.token, error=error)

    def _remove(self, attempt: _OrderedSave) -> None:
        """Remove an attempt, as the leader. Other ranks may still be writing."""
        if not attempt.save.about.is_leader:
            return
        try:
            attempts.abandon(self._storage, attempt.step, attempt.token)
        except OSError as error:
            log_to_stderr(
                f"Leftovers of step {attempt.step} in {self._storage.root} remain: {error}"
            )

    def _commit_complete(self) -> None:
        """Commit each step whose parts are all present, as the leader."""
        for token, attempt in list(self._pending.items()):
            if token not in self._pending:
                continue
            save, step = attempt.save, attempt.step
            try:
                announced = save.announcements(step, token)
                if save.is_complete(announced):
                    save.commit(step, token, announced)
                elif failures := attempts.read_failures(self._storage, announced):
                    rank, error = min(failures.items())
                    raise CheckpointError(f"rank {rank}: {error}")
                elif time.monotonic() >= attempt.deadline:
                    missing = sorted(set(range(save.about.world_size)) - set(announced.parts))
                    raise CheckpointError(
                        f"ranks {missing} did not write their parts in "
                        f"{self._settings.commit_timeout_s:.0f} s"
                    )
                else:
                    continue
            except Exception as error:
                self._fail(attempt, f"{type(error).__name__}: {error}")
                continue
            del self._pending[token]
            self._channel.send(committed=step, token=token)
            for other in [other for other in self._pending.values() if other.step <= step]:
                if other.step < step:
                    # Ranks write steps in order, so one of them skipped this one.
                    self._fail(other, f"step {step} was completed before it")
                else:
                    del self._pending[other.token]
                    self._remove(other)
                    self._channel.send(committed=step, token=other.token)
            if not self._channel.ended:
                delete_old_checkpoints(
                    self._storage,
                    step,
                    keep_latest_k=self._settings.keep_latest_k,
                    keep_every=self._settings.keep_every,
                    tick=self._check_trainer,
                )

    def _act_without_orders(self) -> None:
        """Do what no order requests. Failures are retried, because the trainer may be unable to."""
        if time.monotonic() < self._retry_at:
            return
        try:
            self._follow_decision()
            self._save_for_hanging_trainer()
            self._write_requested()
        except (OSError, CheckpointError) as error:
            self._retry_at = time.monotonic() + _RETRY_S
            log_to_stderr(f"Rank {self._save.about.rank}, without an order: {error}")

    def _write_without_order(self, step: int, token: str) -> None:
        """Write this rank's part if it is missing. Raises OSError or CheckpointError."""
        self._remove_limits()
        attempt = self._attempt(step, token)
        self._writing = attempt
        try:
            direct = self._settings.direct_io
            self._save.write_missing(step, token, direct=direct, tick=self._tick)
        except WriteAbandoned:
            # The trainer is alive and abandoned this step, or the grace period is over.
            return
        finally:
            self._writing = None
        if self._save.about.rank in self._save.announcements(step, token).parts:
            self._is_written(attempt)

    def _save_for_hanging_trainer(self) -> None:
        """Save the newest snapshot of a trainer that received a stop signal but orders no final
        save: it may hang until all processes, including this one, are killed."""
        if not self._channel.stop_requested:
            return
        now = time.monotonic()
        self._stop_requested_at = self._stop_requested_at or now
        if now < self._stop_requested_at + self._settings.preemption_grace_s / _PATIENCE:
            return
        if self._ranks.refresh():
            # No rank continues, so all writers decide equally.
            common = self._ranks.common_step()
            steps = [] if common is None else [common]
        else:
            steps = self._save.possibly_common_steps()
        for step in steps:
            # A stopped trainer cannot forward its signal, so its writer receives a request.
            self._ranks.request_save(step)
        self._channel.stop_requested, self._stop_requested_at = False, None

    def _write_requested(self) -> None:
        """Write the newest step that a writer of this machine requested."""
        for step in sorted(self._ranks.requested_saves() - self._handled_requests, reverse=True):
            if step > self._save.newest_stored():
                # Attempt 0, distinct from orders that the trainer may still send.
                token = attempt_token(self._save.about.generation_id, step, 0)
                self._write_without_order(step, token)
            self._handled_requests.add(step)
            # Orders take precedence.
            return

    def _follow_decision(self) -> None:
        """Write the step that an orphaned writer of this machine decided to flush."""
        if self._followed_decision:
            return
        decided = read_decision(self._ranks)
        if decided is None:
            return
        step, token = decided
        if step > self._save.newest_stored():
            self._write_without_order(step, token)
        self._followed_decision = True

    def _finish(self, *, free: bool) -> None:
        """Finish saves in progress and begin nothing new."""
        while self._pending and (self._grace is None or self._grace.has_time):
            self._channel.poll(0.0 if self._channel.ended else _WAITING_S)
            if self._channel.ended:
                time.sleep(_WAITING_S)
            self._tick_pending()
            self._commit_complete()
        if free:
            self._save.region.unlink()

    @property
    def _grace(self) -> GracePeriod | None:
        """Grace period, once the trainer is gone."""
        ended_at = self._channel.ended_at
        return (
            None if ended_at is None else GracePeriod(ended_at, self._settings.preemption_grace_s)
        )

    def _flush(self) -> None:
        reset_io_priority()
        assert self._grace is not None
        flush(
            self._save,
            # The other replicas retry joint saves without this one.
            pending=[(a.step, a.token) for a in self._pending.values() if not a.is_joint],
            direct=self._settings.direct_io,
            grace=self._grace,
            others_s=self._settings.others_s,
        )

    def _check_trainer(self) -> None:
        """Check whether the trainer is gone, and lift the limits if it is."""
        self._channel.poll()
        if self._channel.ended and self._rate.bytes_per_s is not None:
            self._remove_limits()

    def _remove_limits(self) -> None:
        """Lift all rate and priority limits."""
        reset_io_priority()
        self._rate.bytes_per_s = None

    def _tick(self) -> None:
        """Stop the write in progress on an order to abandon it, or at the end of the grace period.
        Called between its chunks."""
        self._check_trainer()
        attempt, orders = self._writing, self._channel.poll()
        assert attempt is not None
        abandon = next((o for o in orders if o.get("abandon") == attempt.step), None)
        if abandon is not None:
            orders.remove(abandon)
            raise WriteAbandoned
        if self._grace is None:
            return
        if attempt.is_joint or attempt.step < self._save.region.confirmed:
            self._grace.tick_at_half()
        else:
            self._grace.tick()

    def _tick_pending(self) -> None:
        """Execute orders to abandon pending saves while stopping."""
        for order in list(self._channel.poll()):
            if "abandon" in order:
                self._channel.poll().remove(order)
                self._carry_out(order)


def lower_priority(nice: int, *, io_idle: bool) -> None:
    """Lower the priority of this process, as far as the system permits."""
    if nice:
        with suppress(OSError):
            os.nice(nice)
    if io_idle:
        _set_io_class(_CLASS_IDLE, 0)


def reset_io_priority() -> None:
    """Restore the normal I/O priority. The niceness stays: lowering it requires privileges."""
    _set_io_class(_CLASS_BEST_EFFORT, _BEST_EFFORT_NORMAL)


def _set_io_class(io_class: int, level: int) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(number, _WHO_PROCESS, 0, io_class << _CLASS_SHIFT | level)
