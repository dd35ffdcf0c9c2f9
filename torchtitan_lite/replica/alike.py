"""Replicas that train together are alike in all that changes the result. Layer: imports errors
only.

What a replica is like is a part of the id by which the lighthouse knows it, NAME:LIKENESS:UUID, so
that everyone sees that of all others before anything is connected or received.
"""

from collections import Counter
from typing import Protocol

from torchtitan_lite.errors import ReplicaError


class Quorum(Protocol):
    """What is read of torchft's QuorumResult."""

    replica_ids: list[str]
    heal: bool
    recover_src_replica_rank: int | None
    max_world_size: int
    """Of those that are furthest on."""


class OthersDiffer(Exception):
    """Who is not like the others leaves, and the quorum is asked for again without it."""


def id_of(name: str, likeness: str) -> str:
    """Without the UUID, which torchft adds."""
    return f"{name}:{likeness}"


def check_alike(own: str, quorum: Quorum) -> None:
    """Raises ReplicaError where this replica, which is like `own`, has to leave the others of a
    quorum, and OthersDiffer where others have to.

    Who is behind leaves those who are ahead; where several are there, and nobody alone is ahead,
    those leave that are fewer; of two kinds that are equally many the first one stays.
    """
    found = [_likeness_in(one) for one in quorum.replica_ids]
    if set(found) == {own}:
        return
    if quorum.heal and quorum.recover_src_replica_rank is not None:
        wanted = found[quorum.recover_src_replica_rank]
    elif quorum.max_world_size == 1:
        wanted = own
    else:
        # The order of those that come equally often is that in which they come first.
        wanted = Counter(found).most_common(1)[0][0]
    if own != wanted:
        raise ReplicaError(
            f"This replica differs from those that were found: ranks and settings are {own} here, "
            f"and {wanted} there. All replicas need the same config and the same number of ranks: "
            "compare the files config.toml in their folders."
        )
    names = [one.split(":")[0] for one in quorum.replica_ids if _likeness_in(one) != own]
    raise OthersDiffer(f"{', '.join(names)} has another config or number of ranks, and leaves.")


def _likeness_in(replica_id: str) -> str:
    """Empty in what is no id of this project."""
    _, *likeness, _ = replica_id.split(":") if ":" in replica_id else ("", "")
    return ":".join(likeness)
