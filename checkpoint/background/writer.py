"""The writer's loop: orders are carried out one by one, while the leader waits for all ranks.

Invariant: a save that fails is reported, removed, and ends neither the writer nor the training.
Layer: above flush.
"""

import os
import time
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.checkpoint.background.channel import Channel
from torchtitan_lite.checkpoint.background.coworkers import ALONE, Coworkers
from torchtitan_lite.checkpoint.background.flush import Ranks, flush, published
from torchtitan_lite.checkpoint.background.grace import Grace, OutOfTime
from torchtitan_lite.checkpoint.background.priority import hurry
from torchtitan_lite.checkpoint.background.save import (
    RankSave,
    attempt_token,
    delete_old,
    report,
)
from torchtitan_lite.checkpoint.background.settings import WriterSettings
from torchtitan_lite.checkpoint.storage.part_file import Abandoned
from torchtitan_lite.checkpoint.storage.rate import TokenBucket
from torchtitan_lite.checkpoint.storage.storage import Storage
from torchtitan_lite.errors import CheckpointError

_WAITING_S = 0.05
_IDLE_S = 0.2
_RETRY_S = 0.5
_PATIENCE = 3
"""A trainer that was asked to leave gets this part of the grace to save its last step itself."""


@dataclass(frozen=True)
class _Attempt:
    """At a step, by this rank and all that write with it."""

    save: RankSave
    step: int
    token: str
    deadline: float
    """When the wait for the others ends."""
    is_joint: bool
    """With other replicas."""


class Writer:
    """Carries out the orders of one rank's trainer, and flushes when that dies."""

    def __init__(self, save: RankSave, settings: WriterSettings, channel: Channel) -> None:
        self._save, self._settings, self._channel = save, settings, channel
        self._storage: Storage = save.storage
        self._rate = TokenBucket(settings.bytes_per_s)
        self._ranks = Ranks(save)
        self._pending: dict[str, _Attempt] = {}
        """By token, those that the leader has still to commit."""
        self._writing: _Attempt | None = None
        self._followed = False
        self._asked_at: float | None = None
        self._heeded: set[int] = set()
        self._unasked_from = 0.0
        """When what is done without an order may be tried again."""

    def run(self) -> None:
        """Work until the trainer says stop or is gone, and finish what is under way then."""
        if self._save.about.is_leader and self._settings.recovers:
            try:
                self._storage.recover(self._save.about.session)
            except OSError as error:
                report(f"Leavings in {self._storage.root} could not be removed: {error}")
        self._channel.say(ready=os.getpid())
        while True:
            orders = self._channel.look(_WAITING_S if self._pending else _IDLE_S)
            if orders:
                order = orders.pop(0)
                if "stop" in order:
                    self._finish(free=bool(order.get("free")))
                    return
                self._carry_out(order)
            elif self._channel.ended:
                self._flush()
                return
            self._commit_whole()
            self._act_unasked()

    def _carry_out(self, order: dict[str, Any]) -> None:
        if "save" in order:
            save = order["save"]
            if save.get("hurries"):
                self._spare_nothing()
            # The trainer does not hang.
            self._channel.was_asked_to_leave, self._asked_at = False, None
            coworkers = Coworkers.from_json(save["coworkers"]) if "coworkers" in save else ALONE
            step = int(save["step"])
            token = save.get("token") or attempt_token(self._save.about.session, step)
            self._write(int(save["slot"]), step, str(token), coworkers)
        elif "abandon" in order:
            step, token = int(order["abandon"]), None
            for attempt in [a for a in self._pending.values() if a.step == step]:
                token = attempt.token
                del self._pending[token]
                self._remove(attempt)
            self._channel.say(abandoned=step, token=token)
        else:
            self._channel.say(failed=-1, error=f"Unknown order: {order}")

    def _write(self, slot: int, step: int, token: str, coworkers: Coworkers = ALONE) -> None:
        """Write this rank's part, and remember what the leader has to commit."""
        attempt = self._attempt(step, token, coworkers)
        self._writing = attempt
        try:
            attempt.save.write(
                slot,
                step,
                token,
                direct=self._settings.direct_io,
                rate=self._rate,
                tick=self._tick,
            )
        except Abandoned as end:
            self._remove(attempt)
            if isinstance(end, OutOfTime):
                report(f"The save of step {step} by rank {attempt.save.about.rank} ends: {end}")
            self._channel.say(abandoned=step, token=token)
            return
        except Exception as error:
            # Whatever it was, training goes on and the next save may succeed.
            self._fail(attempt, f"{type(error).__name__}: {error}")
            return
        finally:
            self._writing = None
        self._is_written(attempt)

    def _attempt(self, step: int, token: str, coworkers: Coworkers = ALONE) -> _Attempt:
        deadline = time.monotonic() + self._settings.commit_timeout_s
        save = self._save.among(coworkers)
        return _Attempt(save, step, token, deadline, is_joint=coworkers.count > 1)

    def _is_written(self, attempt: _Attempt) -> None:
        self._channel.say(written=attempt.step, token=attempt.token)
        if attempt.save.about.is_leader:
            self._pending[attempt.token] = attempt
            self._commit_whole()

    def _fail(self, attempt: _Attempt, error: str) -> None:
        """Tell the trainer and the other ranks; the leader removes what was written."""
        about, step = attempt.save.about, attempt.step
        if about.is_leader:
            self._pending.pop(attempt.token, None)
            self._remove(attempt)
        else:
            try:
                self._storage.put_failure(step, attempt.token, about.rank, error)
            except OSError as second:
                report(f"Rank {about.rank} could not leave word of its failure: {second}")
        self._channel.say(failed=step, token=attempt.token, error=error)

    def _remove(self, attempt: _Attempt) -> None:
        """Remove an attempt. For the leader, since others may still write theirs."""
        if not attempt.save.about.is_leader:
            return
        try:
            self._storage.abandon(attempt.step, attempt.token)
        except OSError as error:
            report(f"Leavings of step {attempt.step} in {self._storage.root} stay: {error}")

    def _commit_whole(self) -> None:
        """The leader commits each step whose parts are all there."""
        for token, attempt in list(self._pending.items()):
            if token not in self._pending:
                continue
            save, step = attempt.save, attempt.step
            try:
                if save.is_whole(step, token):
                    save.commit(step, token)
                elif failures := self._storage.failures(step, token):
                    rank, error = min(failures.items())
                    raise CheckpointError(f"rank {rank}: {error}")
                elif time.monotonic() >= attempt.deadline:
                    present = self._storage.parts_present(step, token)
                    missing = sorted(set(range(save.about.world_size)) - present)
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
            self._channel.say(committed=step, token=token)
            for other in [other for other in self._pending.values() if other.step <= step]:
                if other.step < step:
                    # Every rank writes its steps in order: one of them left this one out.
                    self._fail(other, f"step {step} became whole before it")
                else:
                    del self._pending[other.token]
                    self._remove(other)
                    self._channel.say(committed=step, token=other.token)
            if not self._channel.ended:
                delete_old(
                    self._storage,
                    step,
                    keep_latest_k=self._settings.keep_latest_k,
                    keep_every=self._settings.keep_every,
                    tick=self._look,
                )

    def _act_unasked(self) -> None:
        """What no order says. What fails is tried again: it is for the case in which nobody is
        left to ask for it."""
        if time.monotonic() < self._unasked_from:
            return
        try:
            self._follow()
            self._save_for_hanging_trainer()
            self._heed()
        except (OSError, CheckpointError) as error:
            self._unasked_from = time.monotonic() + _RETRY_S
            report(f"Rank {self._save.about.rank}, without an order: {error}")

    def _write_unasked(self, step: int, token: str) -> None:
        """Write this rank's part if it is missing. Raises OSError or CheckpointError."""
        self._spare_nothing()
        attempt = self._attempt(step, token)
        self._writing = attempt
        try:
            direct = self._settings.direct_io
            self._save.write_missing(step, token, direct=direct, tick=self._tick)
        except Abandoned:
            # The trainer lives, and wants none of this step; or the time is up.
            return
        finally:
            self._writing = None
        if self._save.about.rank in self._storage.parts_present(step, token):
            self._is_written(attempt)

    def _save_for_hanging_trainer(self) -> None:
        """Write the newest snapshot of a trainer that was asked to leave and orders no last save:
        it may hang until all processes are killed, this one too."""
        if not self._channel.was_asked_to_leave:
            return
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        if now < self._asked_at + self._settings.preemption_grace_s / _PATIENCE:
            return
        if self._ranks.look():
            # Nobody goes on, so that all ranks come to the same.
            common = self._ranks.common_step()
            steps = [] if common is None else [common]
        else:
            steps = self._save.perhaps_common()
        for step in steps:
            # A trainer that is stopped cannot hear: its writer is asked by this one.
            self._ranks.ask_for(step)
        self._channel.was_asked_to_leave, self._asked_at = False, None

    def _heed(self) -> None:
        """Write the newest step that a writer of this machine has asked for."""
        for step in sorted(self._ranks.asked_for() - self._heeded, reverse=True):
            if step > self._save.newest_stored():
                # Of no order, which the trainer may still give.
                token = attempt_token(self._save.about.session, step, 0)
                self._write_unasked(step, token)
            self._heeded.add(step)
            # Orders come first.
            return

    def _follow(self) -> None:
        """Write the step that an orphaned writer of this machine decided to flush."""
        if self._followed:
            return
        decided = published(self._ranks)
        if decided is None:
            return
        step, token = decided
        if step > self._save.newest_stored():
            self._write_unasked(step, token)
        self._followed = True

    def _finish(self, *, free: bool) -> None:
        """What is under way ends; nothing new begins."""
        while self._pending and (self._grace is None or self._grace.may_begin):
            self._channel.look(0.0 if self._channel.ended else _WAITING_S)
            if self._channel.ended:
                time.sleep(_WAITING_S)
            self._tick_pending()
            self._commit_whole()
        if free:
            self._save.region.unlink()

    @property
    def _grace(self) -> Grace | None:
        """What time is left, once the trainer is gone."""
        ended_at = self._channel.ended_at
        return None if ended_at is None else Grace(ended_at, self._settings.preemption_grace_s)

    def _flush(self) -> None:
        hurry()
        assert self._grace is not None
        flush(
            self._save,
            # The other replicas try again without this one.
            pending=[(a.step, a.token) for a in self._pending.values() if not a.is_joint],
            direct=self._settings.direct_io,
            grace=self._grace,
            others_s=self._settings.others_s,
        )

    def _look(self) -> None:
        """Take note of a trainer that is gone: then nothing is spared."""
        self._channel.look()
        if self._channel.ended and self._rate.bytes_per_s is not None:
            self._spare_nothing()

    def _spare_nothing(self) -> None:
        """From now on speed is all that counts."""
        hurry()
        self._rate.bytes_per_s = None

    def _tick(self) -> None:
        """Between the chunks of a write: an order to abandon it ends it, and so does the time when
        the trainer is gone."""
        self._look()
        attempt, orders = self._writing, self._channel.look()
        assert attempt is not None
        abandon = next((o for o in orders if o.get("abandon") == attempt.step), None)
        if abandon is not None:
            orders.remove(abandon)
            raise Abandoned
        if self._grace is None:
            return
        if attempt.is_joint or attempt.step < self._save.region.confirmed:
            self._grace.tick_of_older()
        else:
            self._grace.tick()

    def _tick_pending(self) -> None:
        """While stopping: orders to abandon what is waited for are still heard."""
        for order in list(self._channel.look()):
            if "abandon" in order:
                self._channel.look().remove(order)
                self._carry_out(order)
