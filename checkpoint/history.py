"""Fencing tokens of a run: the quorums that have continued it, in order. Layer: above errors.

Replicas that lose each other, their lighthouse or all their processes must not continue the run
twice. Each quorum therefore claims the next token before its first step: a file with that number,
which only one process can create. A claim without a process of the preceding one is a *takeover*:
what older tokens did afterwards, in memory or on its way to storage, does not belong to the run.

Invariants: tokens increase by one; a token is claimed once; a claim is never visible in part.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import CheckpointError

_FOLDER = "history"
_CLAIM = re.compile(r"([0-9]{8})\.json", re.ASCII)
_CLOCK = "clock"
_KEPT = 16
"""Number of newest claims that are kept."""


@dataclass(frozen=True, kw_only=True)
class HistoryClaim:
    """The claim of a quorum."""

    token: int
    lighthouse: str
    """Identity of the lighthouse that formed the quorum."""
    quorum_id: int
    members: tuple[str, ...]
    """Ids of its processes, each beginning with the replica's name and a colon."""
    last_takeover: int
    """Token of the last takeover up to this claim; 0 if there was none."""
    progress: int
    """Progress at the claim."""

    @property
    def names(self) -> set[str]:
        """Names of the replicas."""
        return {replica_name(one) for one in self.members}

    def next(
        self, lighthouse: str, quorum_id: int, members: tuple[str, ...], progress: int
    ) -> "HistoryClaim":
        """Return the claim of a quorum that continues from this one."""
        return replace(
            self,
            token=self.token + 1,
            lighthouse=lighthouse,
            quorum_id=quorum_id,
            members=members,
            progress=progress,
        )


def replica_name(process_id: str) -> str:
    """Return the replica's name in the id of its process."""
    return process_id.partition(":")[0]


class RunHistory:
    """The claims of a run, in a folder below `run_folder`, which all its replicas share."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.folder = run_folder / _FOLDER

    def newest(self) -> HistoryClaim | None:
        """Return the newest claim; None if there is none. Raises OSError, or CheckpointError if it
        is damaged."""
        while True:
            token = max(self._tokens(), default=0)
            if not token:
                return None
            path = self._path(token)
            # Old claims are removed, so this one may be gone by now.
            with suppress(FileNotFoundError):
                return _parse(path.read_bytes(), token, path)

    def try_claim(self, claim: HistoryClaim) -> bool:
        """Create a claim durably. Return whether no other process has claimed the token. Raises
        OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, draft = self._path(claim.token), self.folder / f".draft-{os.urandom(8).hex()}"
        try:
            with draft.open("xb") as file:
                file.write(json.dumps(asdict(claim)).encode())
                file.flush()
                os.fsync(file.fileno())
            try:
                # In place of a rename, because it fails if the name exists.
                os.link(draft, path)
            except FileExistsError:
                return False
        finally:
            draft.unlink(missing_ok=True)
        for token in self._tokens():
            if token <= claim.token - _KEPT:
                self._path(token).unlink(missing_ok=True)
        return True

    def renew(self, claim: HistoryClaim) -> None:
        """Renew the lease of a claim. Raises OSError. Needs no disk space."""
        os.utime(self._path(claim.token))

    def seconds_since_renewal(self, claim: HistoryClaim) -> float:
        """Return the age of a claim's lease by the clock of the filesystem, which all replicas
        share. Raises OSError."""
        clock = self.folder / _CLOCK
        clock.touch()
        return clock.stat().st_mtime - self._path(claim.token).stat().st_mtime

    def last_token(self, name: str) -> int:
        """Return the last token under which the replica `name` took part; 0 if there is none.
        Raises OSError."""
        try:
            text = (self.folder / name).read_text()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdigit() else 0

    def record_token(self, name: str, token: int) -> None:
        """Record the token under which the replica `name` takes part. Raises OSError."""
        draft = self.folder / f".draft-{os.urandom(8).hex()}"
        draft.write_text(str(token))
        os.replace(draft, self.folder / name)

    def superseded_by(self, token: int) -> HistoryClaim | None:
        """Return the newest claim if it descends from a takeover after `token`: the state of this
        token, which is not 0, does not belong to the run any more. Raises as `newest` does."""
        newest = self.newest() if token else None
        return newest if newest is not None and token < newest.last_takeover else None

    def check(self, token: int) -> None:
        """Raise CheckpointError if `token` is superseded. If the folder cannot be read, it
        counts as not superseded."""
        with suppress(OSError):
            newest = self.superseded_by(token)
            if newest is not None:
                raise CheckpointError(superseded_message(newest, token))

    def _tokens(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [int(found[1]) for name in names if (found := _CLAIM.fullmatch(name))]

    def _path(self, token: int) -> Path:
        return self.folder / f"{token:08d}.json"


def history_name(replica: int) -> str:
    """Return the name of a replica by its number."""
    return f"replica_{replica:05d}"


def superseded_message(newest: HistoryClaim, token: int) -> str:
    """Describe why the state of `token` does not count."""
    names = ", ".join(sorted(newest.names)) or "others"
    return (
        f"{names} could not reach this replica and continued the run without it, under token "
        f"{newest.last_takeover}. Its own steps since then, under token {token}, do not count."
    )


def _parse(content: bytes, token: int, path: Path) -> HistoryClaim:
    try:
        given: dict[str, Any] = json.loads(content)
        claim = HistoryClaim(**{**given, "members": tuple(given["members"])})
        numbers = (claim.token, claim.quorum_id, claim.last_takeover, claim.progress)
        texts = (claim.lighthouse, *claim.members)
        if (
            claim.token != token
            or any(type(one) is not int for one in numbers)
            or any(type(one) is not str for one in texts)
        ):
            raise ValueError("a value has a wrong type")
    except (TypeError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Stop all replicas and delete the folder {path.parent}."
        ) from None
    return claim
