"""No step is taken from a state behind what was seen."""

import pytest

from torchtitan_lite.errors import ReplicaError
from torchtitan_lite.replica.guard import Floor


def test_a_quorum_behind_what_was_seen_is_refused() -> None:
    floor = Floor(0)
    for progress in (0, 16, 16, 48):
        floor.admit(progress)
    with pytest.raises(ReplicaError, match=r"sample 32 at most.*at sample 48"):
        floor.admit(32)
    floor.admit(48)


def test_what_was_restored_is_a_floor() -> None:
    with pytest.raises(ReplicaError, match="start it again"):
        Floor(160).admit(0)


def test_own_progress_raises_it() -> None:
    floor = Floor(0)
    floor.raise_to(64)
    floor.raise_to(32)
    assert floor.highest == 64
