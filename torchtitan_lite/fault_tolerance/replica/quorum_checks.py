"""Checks that a quorum must pass before it is used: it is not behind known progress, its replicas
are compatible, and this process can open connections to them.

The fingerprint of a replica's settings is a part of its id at the lighthouse,
NAME:FINGERPRINT:UUID, so that all replicas see it before they connect or heal.
"""

import os
from collections import Counter
from typing import Protocol

from torchtitan_lite.core.errors import ReplicaError

_NEEDED_DESCRIPTORS = 8
"""File descriptors for the connections to one other replica and to its store."""


class ProgressFloor:
    """Never-backwards guard: the highest progress that this replica has seen.

    Progress is the position in the global order of samples, which advances with every committed or
    skipped step. Invariant: no step starts from a state behind it. A replica that is alone with an
    old state, because its donor died or the network hides the others, stops here rather than
    repeating the run beside replicas that are ahead.
    """

    def __init__(self, progress: int) -> None:
        self._highest = progress

    @property
    def highest(self) -> int:
        return self._highest

    def raise_to(self, progress: int) -> None:
        """Record progress of any replica."""
        self._highest = max(self._highest, progress)

    def check(self, max_progress: int) -> None:
        """Check a quorum whose foremost replica is at `max_progress`, before anything of it is
        used. Raises ReplicaError if that is behind known progress."""
        if max_progress < self._highest:
            raise ReplicaError(
                f"The replicas of this quorum are at most at sample {max_progress}, but this one "
                f"has seen the run at sample {self._highest}. It leaves without training, so that "
                "no step is repeated: restart it to resume from the newest checkpoint."
            )
        self._highest = max_progress


class QuorumResult(Protocol):
    """Part of torchft's QuorumResult that is read here."""

    replica_ids: list[str]
    heal: bool
    recover_src_replica_rank: int | None
    max_world_size: int
    """Number of the foremost replicas."""


class IncompatiblePeers(Exception):
    """Incompatible replicas in the quorum, which leave. The quorum is then requested again."""


def replica_id_for(name: str, config_fingerprint: str) -> str:
    """Return the id at the lighthouse, without the UUID that torchft appends."""
    return f"{name}:{config_fingerprint}"


def check_compatibility(own: str, quorum: QuorumResult) -> None:
    """Check that all replicas of a quorum have the fingerprint `own`. Raises ReplicaError if this
    replica must leave, and IncompatiblePeers if others must.

    A lagging replica leaves those that are ahead. If several are equally far ahead, the minority
    leaves; of two equally large groups the first one stays.
    """
    fingerprints = [_fingerprint_in(replica_id) for replica_id in quorum.replica_ids]
    if set(fingerprints) == {own}:
        return
    if quorum.recover_src_replica_rank is not None:
        wanted = fingerprints[quorum.recover_src_replica_rank]
    elif quorum.max_world_size == 1:
        wanted = own
    else:
        # Counter keeps the order of first occurrence among equal counts.
        wanted = Counter(fingerprints).most_common(1)[0][0]
    if own != wanted:
        raise ReplicaError(
            f"This replica is incompatible with the quorum: the fingerprint of ranks and settings "
            f"is {own} here, but {wanted} there. All replicas need the same config and the same "
            "number of ranks: compare the files config.toml in their folders."
        )
    names = [
        replica_id.split(":")[0]
        for replica_id in quorum.replica_ids
        if _fingerprint_in(replica_id) != own
    ]
    raise IncompatiblePeers(
        f"{', '.join(names)} has another config or number of ranks, and leaves."
    )


def _fingerprint_in(replica_id: str) -> str:
    """Return the fingerprint in a replica's id; empty if the id is not one of this project."""
    _, *config_fingerprint, _ = replica_id.split(":") if ":" in replica_id else ("", "")
    return ":".join(config_fingerprint)


def check_descriptors() -> None:
    """Raise ReplicaError if this process cannot open the descriptors for connections to other
    replicas: otherwise each attempt to connect would be retried until its time limit."""
    opened = []
    try:
        for _ in range(_NEEDED_DESCRIPTORS):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise ReplicaError(
            f"This process cannot open connections to other replicas: {error.strerror}. It leaves, "
            "to be restarted. If the limit of open files is the cause, raise it (ulimit -n)."
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)
