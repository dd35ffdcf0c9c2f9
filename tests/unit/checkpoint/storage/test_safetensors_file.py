"""Part files: valid safetensors for all sizes and offsets, with and without direct I/O."""

import errno
import mmap
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.harness.snapshots import read_safetensors
from torchtitan_lite.checkpoint.storage import safetensors_file
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.storage.safetensors_file import (
    PartBox,
    TokenBucket,
    box_chunks,
    chunks,
    write_safetensors,
)
from torchtitan_lite.core.errors import WriteAbandoned


def _pool(num_bytes: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, num_bytes))
    view[:] = random.Random(0).randbytes(num_bytes)
    return view


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "places",
    [
        [(0, 4096)],
        [(0, 3 << 20), (3 << 20, 100), ((3 << 20) + 100, 7)],
        [(4096, 2 << 20), (8 << 20, 5), (10 << 20, (9 << 20) + 1234)],
        [(5, 2 << 20), ((2 << 20) + 5, 3), (12 << 20, 0), (8 << 20, 4 << 20)],
        [],
    ],
)
def test_every_box_is_read_back(
    tmp_path: Path, places: list[tuple[int, int]], direct: bool
) -> None:
    pool = _pool(20 << 20)
    boxes = [PartBox(f"t{i}", "U8", (n,), start, n) for i, (start, n) in enumerate(places)]
    path = tmp_path / "part.safetensors"
    written = write_safetensors(Files(), path, boxes, pool, direct=direct)
    raw = path.read_bytes()
    actual = read_safetensors(raw)
    for box, place in zip(boxes, written, strict=True):
        expected = bytes(pool[box.start : box.start + box.bytes])
        assert actual[box.name] == ("U8", [box.bytes], expected)
        assert raw[place.first : place.end] == expected
    if boxes:
        assert written[0].first % 4096 == 0
    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == sorted(box.name for box in boxes)
    listed = [pool[start : start + n] for start, n in places]
    again = write_safetensors(Files(), tmp_path / "again", boxes, listed)
    assert again == written and (tmp_path / "again").read_bytes() == raw


def test_a_second_box_of_a_tensor_has_another_name(tmp_path: Path) -> None:
    boxes = [PartBox("w", "U8", (3,), 0, 3), PartBox("w", "U8", (4,), 3, 4)]
    write_safetensors(Files(), tmp_path / "part", boxes, _pool(4096))
    assert list(read_safetensors((tmp_path / "part").read_bytes())) == ["w", "w#2"]


def test_an_abandoned_write_leaves_no_file(tmp_path: Path) -> None:
    ticks = []

    def tick() -> None:
        ticks.append(0)
        if len(ticks) == 3:
            raise WriteAbandoned

    boxes = [PartBox("w", "U8", (64 << 20,), 0, 64 << 20)]
    for direct in (True, False):
        ticks.clear()
        with pytest.raises(WriteAbandoned):
            pool = memoryview(mmap.mmap(-1, 64 << 20))
            write_safetensors(Files(), tmp_path / "part", boxes, pool, direct=direct, tick=tick)
        assert list(tmp_path.iterdir()) == []


class _RejectsLaterWrites(Files):
    """Accepts the flag of direct I/O, and rejects the second write with it."""

    def __init__(self) -> None:
        self._num_writes = 0

    def pwritev(self, descriptor: int, contents: Sequence[memoryview], offset: int) -> None:
        self._count()
        super().pwritev(descriptor, contents, offset)

    def pwrite(self, descriptor: int, content: bytes | memoryview, offset: int) -> None:
        self._count()
        super().pwrite(descriptor, content, offset)

    def _count(self) -> None:
        self._num_writes += 1
        if self._num_writes == 2:
            raise OSError(errno.EINVAL, "Invalid argument")


def test_a_stream_is_generated_again_if_direct_writes_are_rejected(tmp_path: Path) -> None:
    pool = _pool(18 << 20)
    places = [(0, 1 << 20), (1 << 20, 17 << 20)]
    boxes = [PartBox(f"t{i}", "U8", (n,), start, n) for i, (start, n) in enumerate(places)]
    expected = write_safetensors(Files(), tmp_path / "part", boxes, pool)

    def content() -> Iterator[list[memoryview]]:
        return ([pool[start : start + n]] for start, n in places)

    written = write_safetensors(_RejectsLaterWrites(), tmp_path / "stream", boxes, content)
    assert written == expected
    assert (tmp_path / "stream").read_bytes() == (tmp_path / "part").read_bytes()


def test_wrong_sizes_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="w has 4 bytes, but 5 were announced"):
        write_safetensors(
            Files(), tmp_path / "p", [PartBox("w", "U8", (5,), 0, 5)], [memoryview(b"abcd")]
        )


def test_the_rate_limit_is_kept(tmp_path: Path) -> None:
    boxes = [PartBox("w", "U8", (8 << 20,), 0, 8 << 20)]
    started = time.monotonic()
    write_safetensors(Files(), tmp_path / "part", boxes, _pool(8 << 20), rate=TokenBucket(20 << 20))
    assert 0.2 < time.monotonic() - started < 20


def test_chunks_are_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "_STREAM_BYTES", 4)
    view = memoryview(b"0123456789")
    assert [bytes(chunk) for chunk in chunks(view)] == [b"0123", b"4567", b"89"]
    boxes = [PartBox("a", "U8", (5,), 1, 5), PartBox("b", "U8", (0,), 0, 0)]
    expected = [[b"1234", b"5"], []]
    for source in (view, [view[1:6], view[:0]], lambda: [[view[1:5], view[5:6]], []]):
        found = [[bytes(chunk) for chunk in box] for box in box_chunks(source, boxes)]
        assert found == expected


def test_boxes_above_the_size_of_a_write_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool(20 << 20)
    boxes = [PartBox(name, "U8", (n,), start, n) for name, start, n in _LARGE]
    write_safetensors(Files(), tmp_path / "whole", boxes, pool)
    monkeypatch.setattr(safetensors_file, "_CHUNK_BYTES", 1 << 20)
    for direct in (False, True):
        path = tmp_path / f"direct-{direct}"
        write_safetensors(Files(), path, boxes, pool, direct=direct)
        assert path.read_bytes() == (tmp_path / "whole").read_bytes()


_LARGE = [("a", 0, (5 << 20) + 17), ("b", 8 << 20, 9 << 20)]
