"""Announcements, commits and removals of attempts in each kind of storage."""

import secrets
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.base import Storage, open_storage
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox


@pytest.fixture(params=["folder", "object store"])
def storage(tmp_path: Path, request: pytest.FixtureRequest) -> Storage:
    is_local = request.param == "folder"
    return open_storage(str(tmp_path) if is_local else f"memory://{secrets.token_hex(8)}")


def _begin(storage: Storage, step: int, token: str) -> None:
    storage.write(step, token, "rank-00000.safetensors", [], [])


def _ranks(storage: Storage, step: int, token: str) -> list[int]:
    return sorted(attempts.announcements(storage, step, token).parts)


def _failures(storage: Storage, step: int, token: str) -> dict[int, str]:
    return attempts.read_failures(storage, attempts.announcements(storage, step, token))


def _part(storage: Storage, step: int, token: str, rank: int) -> dict[str, Any]:
    return attempts.read_part(storage, attempts.announcements(storage, step, token), rank)


def test_parts_of_another_attempt_are_not_used(storage: Storage) -> None:
    for token in ("a-0", "a-1"):
        _begin(storage, 4, token)
    part = attempts.put_part(storage, 4, "a-0", 0, {"rank": 0})
    attempts.put_failure(storage, 4, "a-1", 1, "full")
    assert _part(storage, 4, "a-0", 0) == part
    assert part == {"rank": 0} | ({"data": "a-0"} if storage.keeps_attempts else {})
    assert _ranks(storage, 4, "b-0") == []
    assert _failures(storage, 4, "a-1") == {1: "full"}
    assert _failures(storage, 4, "a-0") == {}
    attempts.abandon(storage, 4, "a-0")
    assert _ranks(storage, 4, "a-0") == []
    assert _failures(storage, 4, "a-1") == {1: "full"}


def test_a_failure_does_not_count_once_the_part_is_written(storage: Storage) -> None:
    _begin(storage, 4, "a-0")
    attempts.put_failure(storage, 4, "a-0", 0, "full")
    attempts.put_failure(storage, 4, "a-0", 1, "slow")
    attempts.put_part(storage, 4, "a-0", 0, {"rank": 0})
    assert _failures(storage, 4, "a-0") == {1: "slow"}


def test_a_part_that_is_announced_again_is_read_again(storage: Storage) -> None:
    """Each reading is of the file as it is then, whatever was read before."""
    _begin(storage, 4, "a-0")
    for number in range(2):
        attempts.put_part(storage, 4, "a-0", 0, {"number": number})
        assert _part(storage, 4, "a-0", 0)["number"] == number


def test_a_missing_or_damaged_part_is_an_error_of_the_storage(storage: Storage) -> None:
    _begin(storage, 4, "a-0")
    attempts.put_part(storage, 4, "a-0", 1, {})
    with pytest.raises(FileNotFoundError, match="Rank 0 has not announced its part"):
        _part(storage, 4, "a-0", 0)
    storage.announce(4, "a-0", "rank-00000.json", b"{")
    with pytest.raises(OSError, match=r"rank-00000\.json is damaged"):
        _part(storage, 4, "a-0", 0)


def test_a_failure_that_is_removed_after_it_was_listed_is_none(storage: Storage) -> None:
    _begin(storage, 4, "a-0")
    attempts.put_failure(storage, 4, "a-0", 1, "full")
    announced = attempts.announcements(storage, 4, "a-0")
    attempts.abandon(storage, 4, "a-0")
    assert attempts.read_failures(storage, announced) == {}


def test_what_is_removed(storage: Storage) -> None:
    """Attempts that are abandoned, of other sessions, or at earlier steps."""
    boxes = [PartBox("w", "U8", (5,), 0, 5)]

    def begin(step: int, token: str) -> None:
        storage.write(step, token, "rank-00000.safetensors", boxes, [memoryview(b"01234")])
        attempts.put_part(storage, step, token, 0, {})

    every = [(step, token) for step in (1, 2, 3) for token in ("aa-1", "ab-1", "b-1")]
    for step, token in every:
        begin(step, token)

    def left() -> list[tuple[int, str]]:
        return [(step, token) for step, token in every if _ranks(storage, step, token)]

    attempts.abandon(storage, 2, "aa-1")
    assert left() == [one for one in every if one != (2, "aa-1")]
    attempts.recover(storage, "a")
    kept = [(1, "aa-1"), (1, "ab-1"), (2, "ab-1"), (3, "aa-1"), (3, "ab-1")]
    assert left() == kept
    attempts.remove_stale_attempts(storage, 2)
    assert left() == kept[2:]
