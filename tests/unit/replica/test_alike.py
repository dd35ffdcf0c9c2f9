"""Who leaves where replicas of a quorum differ: they all come to the same."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.replica.alike import OthersDiffer, check_alike, id_of


def _leaving(likes: str, steps: list[int]) -> list[int]:
    """The places of those who leave a quorum of replicas that are like the letters of `likes`."""
    ids = [id_of(f"replica_{place:05d}", one) + ":uuid" for place, one in enumerate(likes)]
    ahead = [place for place, step in enumerate(steps) if step == max(steps)]
    found = []
    for place, own in enumerate(likes):
        heals = place not in ahead
        quorum: Any = SimpleNamespace(
            replica_ids=ids,
            heal=heals,
            recover_src_replica_rank=ahead[place % len(ahead)] if heals else None,
            max_world_size=len(ahead),
        )
        try:
            check_alike(own, quorum)
            assert len(set(likes)) == 1
        except ReplicaError:
            found.append(place)
        except OthersDiffer as told:
            assert all(f"replica_{n:05d}" in str(told) for n, o in enumerate(likes) if o != own)
    return found


@pytest.mark.parametrize(
    ("likes", "steps", "leaving"),
    [
        ("aaa", [5, 5, 0], []),
        # Who comes, also before the others in the order of names.
        ("ab", [5, 0], [1]),
        ("ba", [0, 5], [0]),
        ("aab", [5, 5, 0], [2]),
        ("abb", [5, 0, 0], [1, 2]),
        # All begin together.
        ("ab", [0, 0], [1]),
        ("abb", [0, 0, 0], [0]),
        # One of two that are ahead, while a third is behind.
        ("aba", [5, 5, 0], [1]),
    ],
)
def test_one_kind_stays(likes: str, steps: list[int], leaving: list[int]) -> None:
    assert _leaving(likes, steps) == leaving


def test_ids_of_others_are_like_nobody() -> None:
    quorum: Any = SimpleNamespace(
        replica_ids=["replica_00000:1-a:uuid", "somebody:uuid", "x"],
        heal=False,
        recover_src_replica_rank=None,
        max_world_size=1,
    )
    with pytest.raises(OthersDiffer, match="somebody, x"):
        check_alike("1-a", quorum)
