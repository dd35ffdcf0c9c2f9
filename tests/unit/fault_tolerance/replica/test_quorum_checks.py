"""Checks that a quorum must pass before it is used."""

import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.core.errors import ReplicaError
from torchtitan_lite.fault_tolerance.replica.quorum_checks import (
    IncompatiblePeers,
    ProgressFloor,
    check_compatibility,
    check_descriptors,
    replica_id_for,
)


def test_a_quorum_behind_earlier_progress_is_rejected() -> None:
    floor = ProgressFloor(0)
    for progress in (0, 16, 16, 48):
        floor.check(progress)
    with pytest.raises(ReplicaError, match=r"at most at sample 32.*at sample 48"):
        floor.check(32)
    floor.check(48)


def test_restored_progress_is_a_floor() -> None:
    with pytest.raises(ReplicaError, match="restart it"):
        ProgressFloor(160).check(0)


def test_own_progress_raises_the_floor() -> None:
    floor = ProgressFloor(0)
    floor.raise_to(64)
    floor.raise_to(32)
    assert floor.highest == 64


@pytest.mark.parametrize(
    ("fingerprints", "steps", "leaving"),
    [
        ("aaa", [5, 5, 0], []),
        # The newcomer leaves, even if it is first in the order of names.
        ("ab", [5, 0], [1]),
        ("ba", [0, 5], [0]),
        ("aab", [5, 5, 0], [2]),
        ("abb", [5, 0, 0], [1, 2]),
        # All start together.
        ("ab", [0, 0], [1]),
        ("abb", [0, 0, 0], [0]),
        # One of two that are up to date, while a third lags.
        ("aba", [5, 5, 0], [1]),
    ],
)
def test_replicas_with_one_fingerprint_stay(
    fingerprints: str, steps: list[int], leaving: list[int]
) -> None:
    assert _leaving(fingerprints, steps) == leaving


def _leaving(fingerprints: str, steps: list[int]) -> list[int]:
    """Return the indices of the replicas that leave a quorum whose fingerprints are the letters of
    `fingerprints`."""
    ids = [
        replica_id_for(f"replica_{place:05d}", one) + ":uuid"
        for place, one in enumerate(fingerprints)
    ]
    ahead = [place for place, step in enumerate(steps) if step == max(steps)]
    result = []
    for place, own in enumerate(fingerprints):
        heals = place not in ahead
        quorum: Any = SimpleNamespace(
            replica_ids=ids,
            heal=heals,
            recover_src_replica_rank=ahead[place % len(ahead)] if heals else None,
            max_world_size=len(ahead),
        )
        try:
            check_compatibility(own, quorum)
            assert len(set(fingerprints)) == 1
        except ReplicaError:
            result.append(place)
        except IncompatiblePeers as error:
            assert all(
                f"replica_{n:05d}" in str(error) for n, o in enumerate(fingerprints) if o != own
            )
    return result


def test_ids_of_other_systems_match_no_replica() -> None:
    quorum: Any = SimpleNamespace(
        replica_ids=["replica_00000:1-a:uuid", "somebody:uuid", "x"],
        heal=False,
        recover_src_replica_rank=None,
        max_world_size=1,
    )
    with pytest.raises(IncompatiblePeers, match="somebody, x"):
        check_compatibility("1-a", quorum)


def test_a_process_without_descriptors_leaves() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(ReplicaError, match=r"Too many open files.*ulimit -n"):
            check_descriptors()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    check_descriptors()
    assert len(os.listdir("/proc/self/fd")) == before
