"""Announcements, commits and removals of attempts in each kind of storage, and the manifest that is
merged from the parts of ranks."""

import json
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import xxhash

from torchtitan_lite.checkpoint.manifest import _layout
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.attempts import (
    box_entry,
    build_manifest,
    checksum_matches,
    checksum_matches_v2,
    manifest_bytes,
)
from torchtitan_lite.checkpoint.storage.base import Storage, open_storage
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox
from torchtitan_lite.core.errors import CheckpointError, LayoutError, WriteAbandoned


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


def test_a_removed_attempt_is_not_committed(storage: Storage) -> None:
    """Neither after an announcement that came too late."""
    boxes = [PartBox("w", "U8", (5,), 0, 5)]
    (place,) = storage.write(4, "a-0", "rank-00000.safetensors", boxes, [memoryview(b"01234")])
    box = box_entry([0], [5], "rank-00000.safetensors", place)
    tensors = {"w": {"dtype": "U8", "shape": [5], "layout": 0, "boxes": [box]}}
    part = {"rank": 0, "rng": {}, "layouts": [{}], "tensors": tensors}
    part = attempts.put_part(storage, 4, "a-0", 0, part)
    attempts.abandon(storage, 4, "a-0")
    with suppress(OSError):
        attempts.put_part(storage, 4, "a-0", 0, part)
    with pytest.raises(OSError):
        attempts.commit(storage, 4, "a-0", [part], BASE | {"versions": {}})
    assert storage.steps() == []


def test_a_write_ends_as_its_tick_says(storage: Storage) -> None:
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        raise WriteAbandoned

    boxes = [PartBox("w", "U8", (5,), 0, 5)]
    with pytest.raises(WriteAbandoned):
        storage.write(4, "a-0", "rank-00000.safetensors", boxes, [memoryview(b"01234")], tick=tick)
    assert len(ticks) == 1


def test_what_is_removed(storage: Storage) -> None:
    """Attempts that are abandoned, of other generations, or at earlier steps."""
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


BASE = {"mesh": {"dp_shard": 3}, "values": {"train_state": {"step": 5}}, "config": {}}


class CountingList(list[int]):
    """A list that counts how often it is iterated."""

    looks = 0

    def __iter__(self) -> Iterator[int]:
        CountingList.looks += 1
        return super().__iter__()


class CountingLayout(dict[str, Any]):
    """A layout that counts how often it is encoded as JSON."""

    times = 0

    def items(self) -> Any:
        CountingLayout.times += 1
        return super().items()


def _parts(num_ranks: int, num_tensors: int) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "rng": {"python": [rank, 0.5]},
            "layouts": [CountingLayout(shards=num_ranks)],
            "tensors": {
                f"model.{number}": {
                    "dtype": "F32",
                    "shape": [num_ranks, 4],
                    "layout": 0,
                    "boxes": [
                        {
                            "offset": CountingList([rank, 0]),
                            "size": CountingList([1, 4]),
                            "file": f"rank-{rank:05d}.safetensors",
                            "bytes": [4096 + 16 * number, 4112 + 16 * number],
                            "xxh3": "0" * 16,
                        }
                    ],
                }
                for number in range(num_tensors)
            },
        }
        for rank in range(num_ranks)
    ]


def test_joining_reads_each_box_and_layout_a_few_times() -> None:
    num_ranks, num_tensors = 40, 30
    parts = _parts(num_ranks, num_tensors)
    CountingList.looks = CountingLayout.times = 0
    build_manifest(5, parts, BASE | {"versions": {}})
    assert CountingList.looks <= 6 * num_ranks * num_tensors
    assert CountingLayout.times <= 4 * num_ranks


def test_the_text_has_a_line_per_tensor() -> None:
    manifest = build_manifest(5, _parts(3, 20), BASE | {"versions": {"torch": "2"}})
    text = manifest_bytes(manifest)
    digest = json.loads(text)["xxh3"]
    assert json.loads(text) == manifest | {"xxh3": digest} and checksum_matches(text)
    signed = text[: text.index(b'\n "xxh3"')]
    assert xxhash.xxh3_64_hexdigest(signed) == digest
    assert not any(checksum_matches(text[:at] + b"~" + text[at + 1 :]) for at in range(len(text)))
    lines = text.decode().splitlines()
    for number in range(20):
        start = f'  "model.{number}": '
        (line,) = [line for line in lines if line.startswith(start)]
        assert json.loads(line.removeprefix(start).rstrip(","))["shape"] == [3, 4]
    assert len(lines) < 20 + 30


def test_the_checksum_of_version_2_is_that_of_the_other_fields() -> None:
    fields = {"b": [1, {"d": 2, "c": 3}], "a": "x"}
    digest = xxhash.xxh3_64_hexdigest(b'{"a": "x", "b": [1, {"c": 3, "d": 2}]}')
    assert checksum_matches_v2({**fields, "xxh3": digest})
    assert not checksum_matches_v2({**fields, "a": "y", "xxh3": digest})
    assert not checksum_matches_v2(fields)


def test_a_box_that_two_ranks_wrote_is_rejected() -> None:
    parts = _parts(2, 1)
    parts[1]["tensors"] = parts[0]["tensors"]
    parts[1]["tensors"]["model.0"]["boxes"] *= 2
    with pytest.raises(CheckpointError, match=r"The ranks wrote 16 of the 8 elements of model\.0"):
        build_manifest(5, parts, BASE | {"versions": {}})


@pytest.mark.parametrize(
    ("num_axes", "problem"), [(64, "layout 0"), (65, "has 65 axes, and at most 64")]
)
def test_layouts_have_a_bounded_number_of_axes(num_axes: int, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem) as raised:
        _layout(0, {"placements": ["R"] * num_axes})
    assert ("at most" in str(raised.value)) is (num_axes > 64)
