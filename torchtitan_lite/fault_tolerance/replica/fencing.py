"""Which quorum may continue the run.

The lighthouse decides which replicas train together, but there may be two of them, on both sides
of a partition, and a new one knows nothing of the past. So each quorum claims the run's next
fencing token before its first step (`checkpoint.history`):

- A quorum with a process of the last claim may claim at once. Without that process the others of
  that quorum cannot commit a step any more, and only one of them can claim the next token.
- A quorum of new processes of all its replicas, formed by the same lighthouse, may, too: the
  lighthouse has removed the older processes.
- Any other quorum must wait until the lease of the last claim has expired, which its members renew
  while they train, and until `join_timeout_s` has passed if replicas of the last claim are missing:
  they may hold a newer state. Its claim is a takeover.

A replica whose token was superseded by a takeover ends, and restarts without its snapshots.

If the folder does not answer or cannot be written, a quorum continues without a claim if it has
most of the processes of the last one, so that only one side of a partition does. It claims as soon
as it can; if another quorum was first, it ends.

Invariant: a folder that does not answer blocks no thread of the training for longer than
`_ANSWER_WITHIN_S`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torchtitan_lite.checkpoint import (
    FencingTokens,
    TokenClaim,
    name_in_replica_id,
    superseded_message,
)
from torchtitan_lite.core.errors import CheckpointError, ReplicaError
from torchtitan_lite.core.log import logger

LEASE_S = 20.0
"""Age of its lease at which a claim has expired."""
_RENEW_EVERY_S = 4.0
_CHECK_AFTER_S = LEASE_S / 2
"""Time without a check after which a step is not committed without one."""
_POLL_S = 0.2
_CLAIM_WITHIN_S = 1.0
_WAIT_S = 2.0
"""A replica that may not continue waits this long for the claim of another replica of its quorum,
which claims in the first part of this time only. Then it requests a quorum again."""
_ANSWER_WITHIN_S = 2.0
"""Longest wait for the folder."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class _Quorum:
    """A quorum that asks for admission."""

    quorum_id: int
    lighthouse: str
    members: tuple[str, ...]
    """Ids of its processes."""
    own_id: str
    tokens: tuple[int, ...]
    """Last tokens of its replicas; 0: unknown."""

    def has_most_of(self, claim: TokenClaim) -> bool:
        """Return whether most processes of a claim are members, or half of them and among these
        the first."""
        present = [member for member in claim.members if member in self.members]
        surplus = 2 * len(present) - len(claim.members)
        return surplus > 0 or (surplus == 0 and min(claim.members, default="") in present)


class Fence:
    """The fencing tokens of the run, as the leader of one replica sees them."""

    def __init__(self, fencing_tokens: FencingTokens, join_timeout_s: float) -> None:
        """Starts a thread that renews leases."""
        self._tokens, self._join_timeout_s = fencing_tokens, join_timeout_s
        self._call: Future[Any] | None = None
        """Access to the tokens that may still run."""
        self.token = 0
        """Last token under which this replica took part; 0 if there is none."""
        self.is_claimed = True
        """Whether the quorum has a claim of its own, and does not continue without one."""
        self._newest: TokenClaim | None = None
        """Newest claim that is known."""
        self._quorum: _Quorum | None = None
        """Present quorum."""
        self._is_superseded = False
        self._expired: tuple[int, float] | None = None
        """Token of an expired claim, and since when this replica knows it."""
        self._num_failures = 0
        """Consecutive failures to access them."""
        self._is_closed = False
        self._checks = threading.Condition()
        self._checked_s = time.monotonic()
        """When the last check began."""
        self._wanted_s = 0.0
        """When a check was last wanted."""
        with suppress(OSError, CheckpointError):
            self.token = self._within_wait(fencing_tokens.last_token)
        threading.Thread(target=self._check_regularly, name="fencing", daemon=True).start()

    def admit(
        self,
        *,
        quorum_id: int,
        lighthouse: str,
        members: Sequence[str],
        own_id: str,
        tokens: Sequence[int],
    ) -> str:
        """Return "" if the quorum may continue the run, else why not yet, after at most
        `_WAIT_S` and `_ANSWER_WITHIN_S`.

        `members` are the ids of its processes, `tokens` the last ones of their replicas (0:
        unknown). Raises ReplicaError if this replica has been superseded.
        """
        quorum = _Quorum(
            quorum_id=quorum_id,
            lighthouse=lighthouse,
            members=tuple(members),
            own_id=own_id,
            tokens=tuple(tokens),
        )
        started_s = time.monotonic()
        while True:
            try:
                admission = self._within_wait(lambda: self._admitted(quorum, started_s))
                self._report_success()
            except OSError as error:
                if self._newest is None or not quorum.has_most_of(self._newest):
                    problem = _text(error)
                    return f"{self._tokens.folder} is needed to continue the run: {problem}"
                self._report_failure(error)
                admission = self._newest
            except CheckpointError as error:
                raise ReplicaError(str(error)) from None
            if isinstance(admission, TokenClaim):
                self._expired = None
                self._adopt(quorum, admission)
                return ""
            if admission is not None:
                if time.monotonic() - started_s >= _WAIT_S:
                    return admission
                time.sleep(_POLL_S)

    def is_superseded(self) -> bool:
        """Return whether other replicas have taken the run over from this one. Waits, at most
        `_ANSWER_WITHIN_S`, for a check of the tokens if there was none lately, as after this
        process was suspended."""
        now_s = time.monotonic()
        with self._checks:
            # If an earlier wait was in vain, the folder does not answer.
            if now_s - self._checked_s >= _CHECK_AFTER_S and self._wanted_s <= self._checked_s:
                self._wanted_s = now_s
                self._checks.notify_all()
                self._checks.wait_for(lambda: self._checked_s >= now_s, _ANSWER_WITHIN_S)
        return self._is_superseded

    def release(self, own_id: str) -> None:
        """Record that this process leaves, so that no one waits for it: its state is saved, or in
        shared memory, from which it will continue."""
        self.close()

        def remove() -> None:
            while (newest := self._tokens.newest()) is not None and own_id in newest.members:
                left = tuple(member for member in newest.members if member != own_id)
                if self._tokens.try_claim(newest.next(newest.lighthouse, 0, left)):
                    return

        with suppress(OSError, CheckpointError):
            self._within_wait(remove)

    def close(self) -> None:
        """Stop renewing leases. Idempotent."""
        with self._checks:
            self._is_closed = True
            self._checks.notify_all()

    def _admitted(self, quorum: _Quorum, started_s: float) -> TokenClaim | str | None:
        """Return the claim of the quorum and record its token, or why it may not continue yet; None
        to be called again, because another process claimed the token. Raises OSError,
        CheckpointError and ReplicaError."""
        newest = self._tokens.newest()
        decision = self._decide(quorum, newest, started_s)
        self._newest = newest
        if not isinstance(decision, TokenClaim):
            return decision
        if decision is not newest:
            if time.monotonic() - started_s >= _CLAIM_WITHIN_S:
                return "this replica was about to continue the run"
            if not self._tokens.try_claim(decision):
                return None
            self._newest = decision
        if decision.token != self.token:
            # The claim says the same, unless this replica joins it later.
            with suppress(OSError):
                self._tokens.record_token(decision.token)
        return decision

    def _decide(
        self, quorum: _Quorum, newest: TokenClaim | None, started_s: float
    ) -> TokenClaim | str:
        """Return the claim that the quorum needs, which is `newest` if it has made it already, or
        why it may not continue yet. Raises OSError and ReplicaError."""
        last = 0 if newest is None else newest.token
        if max(quorum.tokens, default=0) > last:
            return (
                f"{self._tokens.folder} is at token {last}, and another replica has seen "
                f"{max(quorum.tokens)}: all replicas need the same job.dump_folder"
            )
        if newest is None:
            return TokenClaim(
                token=1,
                lighthouse=quorum.lighthouse,
                quorum_id=quorum.quorum_id,
                members=quorum.members,
                last_takeover=0,
            )
        if newest.is_of(quorum.lighthouse, quorum.quorum_id, quorum.members):
            return newest
        if self.token and self.token < newest.last_takeover:
            raise ReplicaError(
                f"{superseded_message(newest, self.token)} Restart it: it resumes from storage."
            )
        if any(0 < token < newest.last_takeover for token in quorum.tokens):
            return "another replica of the quorum must restart, because a takeover superseded it"
        following = newest.next(quorum.lighthouse, quorum.quorum_id, quorum.members)
        missing = newest.names - {name_in_replica_id(member) for member in quorum.members}
        continues = not newest.members or set(newest.members) & set(quorum.members)
        if continues or (not missing and newest.lighthouse == quorum.lighthouse):
            return following
        age_s = self._tokens.seconds_since_renewal(newest)
        if age_s < LEASE_S:
            self._expired = None
            return (
                f"{', '.join(sorted(newest.names))} trained {age_s:.0f} s ago with another "
                "lighthouse, or ended just now: all replicas need the same lighthouse"
            )
        if self._expired is None or self._expired[0] != newest.token:
            self._expired = newest.token, started_s
        if missing and time.monotonic() - self._expired[1] < self._join_timeout_s:
            return (
                f"{', '.join(sorted(missing))} may have a newer state: waiting for "
                f"fault_tolerance.join_timeout_s = {self._join_timeout_s:g} s"
            )
        return replace(following, last_takeover=following.token)

    def _adopt(self, quorum: _Quorum, claim: TokenClaim) -> None:
        """Continue the run as `quorum`, under its own claim or without one."""
        with self._checks:
            self._quorum, self.token = quorum, claim.token
            self.is_claimed = claim.is_of(quorum.lighthouse, quorum.quorum_id, quorum.members)
            self._checked_s = time.monotonic()

    def _check_regularly(self) -> None:
        """Check the fencing tokens every few seconds, and when `is_superseded` wants it."""
        while True:
            with self._checks:
                self._checks.wait_for(
                    lambda: self._is_closed or self._wanted_s > self._checked_s, _RENEW_EVERY_S
                )
                if self._is_closed:
                    return
                started_s = time.monotonic()
            try:
                self._check()
                self._report_success()
            except (OSError, CheckpointError) as error:
                self._report_failure(error)
            with self._checks:
                self._checked_s = started_s
                self._checks.notify_all()

    def _check(self) -> None:
        """Renew the lease, claim if the quorum continued without a claim, and find out whether this
        replica is superseded. Raises OSError or CheckpointError."""
        with self._checks:
            quorum, token, is_claimed = self._quorum, self.token, self.is_claimed
        newest = self._tokens.newest()
        if quorum is None or newest is None:
            return
        self._is_superseded = newest.supersedes(token, self._tokens.name, is_claimed=is_claimed)
        if self._is_superseded:
            return
        if not is_claimed:
            if newest.token == token:
                following = newest.next(quorum.lighthouse, quorum.quorum_id, quorum.members)
                newest = following if self._tokens.try_claim(following) else newest
            with self._checks:
                is_present = self._quorum is quorum
            if is_present and newest.token != token:
                self._adopt(quorum, newest)
        if quorum.own_id in newest.members and not self._is_closed:
            self._tokens.renew(newest)

    def _within_wait(self, access: Callable[[], _T]) -> _T:
        """Call `access` in another thread. Raises its error, or OSError if it, or an earlier call,
        does not end within `_ANSWER_WITHIN_S`."""
        if self._call is not None:
            # Its outcome was for another question.
            self._call.exception(_ANSWER_WITHIN_S)
        self._call = future = Future[_T]()

        def run() -> None:
            try:
                future.set_result(access())
            except BaseException as error:
                future.set_exception(error)

        # Threads of a pool would delay the end of the process.
        threading.Thread(target=run, name="fencing access", daemon=True).start()
        return future.result(_ANSWER_WITHIN_S)

    def _report_failure(self, error: Exception) -> None:
        """Log the first of consecutive failures."""
        self._num_failures += 1
        if self._num_failures == 1:
            logger.warning(
                "%s cannot be read or written: %s. Training continues.",
                self._tokens.folder,
                _text(error),
            )

    def _report_success(self) -> None:
        if self._num_failures:
            logger.info(
                "%s answers again after %d failures.", self._tokens.folder, self._num_failures
            )
        self._num_failures = 0


def _text(error: Exception) -> str:
    """Describe an error. A timeout has no text of its own."""
    return str(error) or "it does not answer"
