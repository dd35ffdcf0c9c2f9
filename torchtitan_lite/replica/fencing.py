"""Which quorum may continue the run. Layer: above checkpoint.

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
If the folder is unreachable, a quorum with a process of the last known claim continues.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from torchtitan_lite.checkpoint import (
    HistoryClaim,
    RunHistory,
    replica_name,
    superseded_message,
)
from torchtitan_lite.errors import CheckpointError, ReplicaError
from torchtitan_lite.log import logger

LEASE_S = 20.0
"""Age of its lease at which a claim has expired."""
_RENEW_EVERY_S = 4.0
_NUM_RENEWING = 2
"""Members of a quorum that renew its lease."""
_CHECK_AFTER_S = LEASE_S / 2
"""Time without a check after which a step is not committed without one."""
_POLL_S = 0.2
_CLAIM_WITHIN_S = 1.0
_WAIT_S = 2.0
"""A replica that may not continue waits this long for the claim of another replica of its quorum,
which claims in the first part of this time only. Then it requests a quorum again."""


class Fence:
    """The run's history, as the leader of one replica sees it."""

    def __init__(self, history: RunHistory, name: str, join_timeout_s: float) -> None:
        """`name` is that of the replica. Starts a thread that renews leases."""
        self._history, self._name, self._join_timeout_s = history, name, join_timeout_s
        self.token = 0
        """Last token under which this replica took part; 0 if there is none."""
        with suppress(OSError):
            self.token = history.last_token(name)
        self._claim: HistoryClaim | None = None
        """Claim of the present quorum."""
        self._renews = False
        self._superseded: HistoryClaim | None = None
        self._checked_s = time.monotonic()
        self._waiting_since_s: float | None = None
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._renew_regularly, name="history", daemon=True).start()

    def admit(
        self,
        *,
        quorum_id: int,
        lighthouse: str,
        members: Sequence[str],
        own_id: str,
        tokens: Sequence[int],
        progress: int,
    ) -> str:
        """Return "" if the quorum may continue the run, else why not yet, after at most `_WAIT_S`.

        `members` are the ids of its processes, `tokens` the last ones of their replicas (0:
        unknown). Raises ReplicaError if this replica has been superseded.
        """
        started_s = time.monotonic()
        self._waiting_since_s = self._waiting_since_s or started_s
        while True:
            may_claim = time.monotonic() - started_s < _CLAIM_WITHIN_S
            try:
                claim = self._admitted(
                    quorum_id, lighthouse, tuple(members), tokens, progress, may_claim=may_claim
                )
            except OSError as error:
                known = self._claim
                if known is None or not set(known.members) & set(members):
                    claim = f"{self._history.folder} is needed to continue the run: {error}"
                else:
                    logger.warning("The history of the run cannot be read: %s", error)
                    claim = known
            except CheckpointError as error:
                raise ReplicaError(str(error)) from None
            if isinstance(claim, HistoryClaim):
                self._adopt(claim, renews=list(members).index(own_id) < _NUM_RENEWING)
                return ""
            if claim is not None:
                if time.monotonic() - started_s >= _WAIT_S:
                    return claim
                time.sleep(_POLL_S)

    def is_superseded(self) -> bool:
        """Return whether a takeover has superseded this replica. Reads the history only if it was
        not read lately, as after this process was suspended."""
        if time.monotonic() - self._checked_s >= _CHECK_AFTER_S:
            self._check()
        return self._superseded is not None

    def release(self, own_id: str) -> None:
        """Record that this process leaves with its state saved, so that no one waits for it."""
        self.close()
        with suppress(OSError, CheckpointError):
            while (newest := self._history.newest()) is not None and own_id in newest.members:
                left = tuple(one for one in newest.members if one != own_id)
                claim = newest.next(newest.lighthouse, 0, left, newest.progress)
                if self._history.try_claim(claim):
                    return

    def close(self) -> None:
        """Stop renewing leases. Idempotent."""
        self._is_closed.set()
        with self._lock:
            self._renews = False

    def _admitted(
        self,
        quorum_id: int,
        lighthouse: str,
        members: tuple[str, ...],
        tokens: Sequence[int],
        progress: int,
        *,
        may_claim: bool,
    ) -> HistoryClaim | str | None:
        """Return the claim of the quorum, or why it may not continue yet; None to be called again,
        because another process claimed the token. Raises OSError, CheckpointError and
        ReplicaError."""
        newest = self._history.newest()
        if newest is None:
            first = HistoryClaim(
                token=1,
                lighthouse=lighthouse,
                quorum_id=quorum_id,
                members=members,
                last_takeover=0,
                progress=progress,
            )
            return self._try_claim(first, may_claim)
        if (newest.lighthouse, newest.quorum_id, newest.members) == (
            lighthouse,
            quorum_id,
            members,
        ):
            return newest
        if self.token and self.token < newest.last_takeover:
            raise ReplicaError(
                f"{superseded_message(newest, self.token)} Restart it: it resumes from storage."
            )
        if max(tokens) > newest.token:
            return (
                f"{self._history.folder} is at token {newest.token}, and another replica has seen "
                f"{max(tokens)}: all replicas need the same job.dump_folder"
            )
        if any(0 < one < newest.last_takeover for one in tokens):
            return "another replica of the quorum must restart, because a takeover superseded it"
        following = newest.next(lighthouse, quorum_id, members, progress)
        if not newest.members or set(newest.members) & set(members):
            try:
                return self._try_claim(following, may_claim)
            except OSError as error:
                # A full disk does not end the training. Nobody else can claim the token there.
                logger.warning("The quorum is not recorded in the run's history: %s", error)
                return newest
        missing = newest.names - {replica_name(one) for one in members}
        if not missing and newest.lighthouse == lighthouse:
            return self._try_claim(following, may_claim)
        age_s = self._history.seconds_since_renewal(newest)
        if age_s < LEASE_S:
            return (
                f"{', '.join(sorted(newest.names))} trained {age_s:.0f} s ago with another "
                "lighthouse, or ended just now: all replicas need the same lighthouse"
            )
        assert self._waiting_since_s is not None
        waited_s = time.monotonic() - self._waiting_since_s
        if missing and waited_s < self._join_timeout_s:
            return (
                f"{', '.join(sorted(missing))} may have a newer state: waiting for "
                f"fault_tolerance.join_timeout_s = {self._join_timeout_s:g} s"
            )
        return self._try_claim(replace(following, last_takeover=following.token), may_claim)

    def _try_claim(self, claim: HistoryClaim, may_claim: bool) -> HistoryClaim | str | None:
        if not may_claim:
            return "this replica was about to continue the run"
        return claim if self._history.try_claim(claim) else None

    def _adopt(self, claim: HistoryClaim, *, renews: bool) -> None:
        self._waiting_since_s = None
        with self._lock:
            self._claim, self._renews = claim, renews and not self._is_closed.is_set()
        self._checked_s = time.monotonic()
        if claim.token != self.token:
            self.token = claim.token
            with suppress(OSError):
                self._history.record_token(self._name, claim.token)

    def _check(self) -> None:
        try:
            self._superseded = self._history.superseded_by(self.token) or self._superseded
        except (OSError, CheckpointError) as error:
            logger.warning("The history of the run cannot be read: %s", error)
        self._checked_s = time.monotonic()

    def _renew_regularly(self) -> None:
        while not self._is_closed.wait(_RENEW_EVERY_S):
            self._check()
            # The lock keeps a lease from being renewed after `close`.
            with self._lock, suppress(OSError):
                if self._renews and self._claim is not None and self._superseded is None:
                    self._history.renew(self._claim)
