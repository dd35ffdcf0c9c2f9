"""Joining parts into a manifest and encoding it take linear time."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash

from torchtitan_lite.checkpoint.manifest import _layout
from torchtitan_lite.checkpoint.storage.manifest_json import (
    build_manifest,
    checksum_matches,
    checksum_matches_v2,
    manifest_bytes,
)
from torchtitan_lite.core.errors import CheckpointError, LayoutError

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
