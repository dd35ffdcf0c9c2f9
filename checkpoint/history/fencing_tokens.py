"""Fencing tokens of a run: the quorums that have continued it, in order.

Replicas that lose each other, their lighthouse or all their processes must not continue the run
twice. Each quorum therefore claims the next token before its first step: a file with that number,
which only one process can create. A claim without a process of the preceding one is a *takeover*:
what older tokens did afterwards, in memory or on its way to storage, does not belong to the run.

Invariants: tokens increase by one; a token is claimed once; a claim is never visible in part.
"""

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.lease_file import NoHardLinks, create_whole
from torchtitan_lite.core.outputs import quorum_name

_FOLDER = "history"
_CLAIM = re.compile(r"([0-9]{8})\.json", re.ASCII)
_CLOCK = "clock"
_KEPT = 16
"""Number of newest claims that are kept."""
_DRAFT = ".draft-"
_STALE_DRAFT_S = 3600.0


class SupersededError(CheckpointError):
    """State that others have taken over: it does not belong to the run any more."""


@dataclass(frozen=True, kw_only=True)
class TokenClaim:
    """The claim of a fencing token by a quorum."""

    token: int
    lighthouse: str
    """Identity of the lighthouse that formed the quorum."""
    quorum_id: int
    members: tuple[str, ...]
    """Ids of its processes, each beginning with the replica's name and a colon."""
    last_takeover: int
    """Token of the last takeover up to this claim; 0 if there was none."""

    @property
    def names(self) -> set[str]:
        """Names of the replicas."""
        return {name_in_replica_id(member) for member in self.members}

    def next(self, lighthouse: str, quorum_id: int, members: tuple[str, ...]) -> "TokenClaim":
        """Return the claim of a quorum that continues from this one."""
        return replace(
            self,
            token=self.token + 1,
            lighthouse=lighthouse,
            quorum_id=quorum_id,
            members=members,
        )

    def supersedes(self, token: int, name: str, *, is_claimed: bool) -> bool:
        """Return whether the state of the replica `name` under `token` does not belong to the run
        any more, given that this is the newest claim: because it descends from a takeover after
        `token`, or, for a quorum that continued under `token` without a claim of its own
        (`is_claimed` is false), because other replicas made it."""
        is_other = self.token > token and name not in self.names
        return token < self.last_takeover or (not is_claimed and is_other)

    def is_of(self, lighthouse: str, quorum_id: int, members: tuple[str, ...]) -> bool:
        """Return whether a quorum with these properties made the claim."""
        made_by = (lighthouse, quorum_id, members)
        return (self.lighthouse, self.quorum_id, self.members) == made_by


def name_in_replica_id(replica_id: str) -> str:
    """Return the name of a replica, which is the first part of its id."""
    return replica_id.partition(":")[0]


class FencingTokens:
    """The fencing tokens of a run and their claims, in a folder below `run_folder`, which all its
    replicas share, as one replica sees them."""

    def __init__(self, run_folder: Path, replica: int) -> None:
        self.run_folder, self.replica = run_folder, replica
        self.name = quorum_name(replica)
        """The replica's name in the claims."""
        self.folder = run_folder / _FOLDER

    def newest(self) -> TokenClaim | None:
        """Return the newest claim; None if there is none. Raises OSError, or CheckpointError if it
        is damaged."""
        while True:
            token = max(self._tokens(), default=0)
            if not token:
                return None
            if (claim := self._read(token)) is not None:
                return claim

    def try_claim(self, claim: TokenClaim) -> bool:
        """Create a claim durably. Return whether no other process has claimed the token. Raises
        OSError, or CheckpointError if the filesystem has no hard links."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f"{_DRAFT}{os.urandom(8).hex()}"
        content = json.dumps(asdict(claim)).encode()
        try:
            if not create_whole(self._path(claim.token), content, draft=draft):
                return False
        except NoHardLinks as error:
            raise CheckpointError(
                f"The filesystem of {self.folder} has no hard links, which replicas need in "
                f"job.dump_folder: {error}"
            ) from None
        Files().sync_folder(self.folder)
        self._remove_old(claim.token)
        return True

    def renew(self, claim: TokenClaim) -> None:
        """Renew the lease of a claim. Raises OSError. Needs no disk space."""
        os.utime(self._path(claim.token))

    def seconds_since_renewal(self, claim: TokenClaim) -> float:
        """Return the age of a claim's lease by the clock of the filesystem, which all replicas
        share. Raises OSError."""
        clock = self.folder / _CLOCK
        clock.touch()
        return clock.stat().st_mtime - self._path(claim.token).stat().st_mtime

    def last_token(self) -> int:
        """Return the last token under which this replica took part; 0 if there is none. Raises
        OSError, or CheckpointError if a claim is damaged."""
        recorded = 0
        with suppress(FileNotFoundError):
            text = (self.folder / self.name).read_text()
            recorded = int(text) if text.isdecimal() else 0
        # A full disk may have prevented the record of a claim that another replica made.
        for token in sorted(self._tokens(), reverse=True):
            if token <= recorded:
                break
            claim = self._read(token)
            if claim is not None and self.name in claim.names:
                return token
        return recorded

    def record_token(self, token: int) -> None:
        """Record the token under which this replica takes part. Raises OSError."""
        draft = self.folder / f"{_DRAFT}{os.urandom(8).hex()}"
        try:
            draft.write_text(str(token))
            os.replace(draft, self.folder / self.name)
        finally:
            draft.unlink(missing_ok=True)

    def superseded_by(self, token: int, *, is_claimed: bool = True) -> TokenClaim | None:
        """Return the newest claim if it supersedes this replica's state under `token`. Raises as
        `newest` does."""
        newest = self.newest()
        if newest is None or not newest.supersedes(token, self.name, is_claimed=is_claimed):
            return None
        return newest

    def check(self, token: int, *, is_claimed: bool = True) -> None:
        """Raise SupersededError if the state of `token` does not belong to the run any more, and
        CheckpointError if a claim is damaged. If the folder cannot be read, it counts as part of
        the run."""
        with suppress(OSError):
            newest = self.superseded_by(token, is_claimed=is_claimed)
            if newest is not None:
                raise SupersededError(superseded_message(newest, token))

    def _read(self, token: int) -> TokenClaim | None:
        path = self._path(token)
        # Old claims are removed, so this one may be gone by now.
        with suppress(FileNotFoundError):
            return _parse(path.read_bytes(), token, path)
        return None

    def _remove_old(self, token: int) -> None:
        """Remove claims that `token` makes obsolete, and drafts of processes that were killed."""
        for older in self._tokens():
            if older <= token - _KEPT:
                self._path(older).unlink(missing_ok=True)
        for draft in self.folder.glob(f"{_DRAFT}*"):
            with suppress(FileNotFoundError):
                if time.time() - draft.stat().st_mtime > _STALE_DRAFT_S:
                    draft.unlink()

    def _tokens(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))]

    def _path(self, token: int) -> Path:
        return self.folder / f"{token:08d}.json"


def superseded_message(newest: TokenClaim, token: int) -> str:
    """Describe why the state of `token` does not count."""
    names = ", ".join(sorted(newest.names)) or "others"
    return (
        f"{names} could not reach this replica and continued the run without it, under token "
        f"{max(newest.last_takeover, token + 1)}. Its own steps since then, under token {token}, "
        "do not count."
    )


def _parse(content: bytes, token: int, path: Path) -> TokenClaim:
    try:
        values: dict[str, Any] = json.loads(content)
        claim = TokenClaim(**{**values, "members": tuple(values["members"])})
        numbers = (claim.token, claim.quorum_id, claim.last_takeover)
        texts = (claim.lighthouse, *claim.members)
        if (
            claim.token != token
            or any(type(number) is not int for number in numbers)
            or any(type(text) is not str for text in texts)
        ):
            raise ValueError("a value has a wrong type")
    except (TypeError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Stop all replicas and delete the folder {path.parent}."
        ) from None
    return claim
