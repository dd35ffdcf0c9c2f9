"""Attempts at a step, in any storage: the announcements of the ranks, the commit of their parts,
and the removal of attempts.

Each rank announces the part that it has written, or that it writes nothing. The leader merges the
parts into the manifest.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.checkpoint.storage.base import Storage
from torchtitan_lite.checkpoint.storage.manifest_json import build_manifest, manifest_bytes

_PART = re.compile(r"rank-([0-9]{5})\.json", re.ASCII)
_FAILURE = re.compile(r"rank-([0-9]{5})\.failed", re.ASCII)
_ALL_STEPS = range(10**18)


@dataclass(frozen=True)
class Announcements:
    """Announcements of an attempt."""

    parts: dict[int, str]
    """Rank -> path of its part."""
    failures: dict[int, str]
    """Rank -> path of its error, of ranks without a part: one that failed and succeeded later is
    not among them."""


def put_part(
    storage: Storage, step: int, token: str, rank: int, part: Mapping[str, Any]
) -> dict[str, Any]:
    """Announce durably that a rank has written everything in `part`, and return the part as the
    manifest needs it."""
    part = {**part, "data": token} if storage.keeps_attempts else dict(part)
    storage.announce(step, token, f"rank-{rank:05d}.json", json.dumps(part).encode())
    return part


def put_failure(storage: Storage, step: int, token: str, rank: int, error: str) -> None:
    """Announce that a rank writes nothing in this attempt."""
    storage.announce(step, token, f"rank-{rank:05d}.failed", json.dumps(error).encode())


def announcements(storage: Storage, step: int, token: str) -> Announcements:
    """Return the announcements of an attempt as they are now."""
    paths = storage.announced(step, token)
    parts, failures = _by_rank(_PART, paths), _by_rank(_FAILURE, paths)
    return Announcements(
        parts, {rank: path for rank, path in failures.items() if rank not in parts}
    )


def read_part(storage: Storage, announced: Announcements, rank: int) -> dict[str, Any]:
    """Return a part as `put_part` returned it. Raises OSError."""
    if rank not in announced.parts:
        raise FileNotFoundError(f"Rank {rank} has not announced its part in {storage.root}.")
    return _read(storage, announced.parts[rank])


def read_failures(storage: Storage, announced: Announcements) -> dict[int, str]:
    """Return rank -> error of the announced failures that are still there. Raises OSError."""
    errors = {}
    for rank, path in announced.failures.items():
        with suppress(FileNotFoundError):
            errors[rank] = str(_read(storage, path))
    return errors


def commit(
    storage: Storage,
    step: int,
    token: str,
    parts: Iterable[Mapping[str, Any]],
    base: Mapping[str, Any],
) -> None:
    """Merge the parts of all ranks with `base`, see `build_manifest`, and make the step visible as
    `Storage.commit` does."""
    storage.commit(step, token, manifest_bytes(build_manifest(step, parts, base)))


def abandon(storage: Storage, step: int, token: str) -> None:
    """Remove what an attempt wrote without committing it."""
    storage.remove_attempts(step, lambda other: other != token)


def recover(storage: Storage, session: str) -> None:
    """Remove what killed processes left, except for attempts whose tokens begin with `session`. For
    one process, before it saves."""
    storage.remove_attempts(_ALL_STEPS, lambda token: token.startswith(session))


def remove_stale_attempts(storage: Storage, before: int) -> None:
    """Remove attempts at steps older than `before`, which is committed: they cannot succeed,
    because every rank writes its steps in order."""
    storage.remove_attempts(range(before), lambda token: False)


def _by_rank(pattern: re.Pattern[str], paths: Iterable[str]) -> dict[int, str]:
    names = ((pattern.fullmatch(path.rpartition("/")[2]), path) for path in paths)
    return {int(match[1]): path for match, path in names if match}


def _read(storage: Storage, path: str) -> Any:
    try:
        return json.loads(bytes(storage.read(path)))
    except ValueError as error:
        raise OSError(f"{storage.root}/{path} is damaged: {error}") from None
