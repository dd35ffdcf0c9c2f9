"""Regions: what survives a crash, which slots count as empty, and missing memory."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.snapshots import description, slot_bytes_of
from torchtitan_lite.checkpoint.shared_memory import region_file
from torchtitan_lite.checkpoint.shared_memory.description import RegionDescription
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotHeader, SlotState
from torchtitan_lite.checkpoint.shared_memory.region_file import (
    ALIGNMENT,
    MAX_SLOTS,
    InsufficientMemory,
)
from torchtitan_lite.core.errors import DamagedSnapshot


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    made = Region.create(tmp_path, 3, {"a": [1, "x"]}, 5000, values_bytes=200)
    yield made
    made.close()


def _fill(region: Region, slot: int, step: int) -> None:
    region.begin(slot, step)
    region.data(slot)[:4] = step.to_bytes(4, "little")
    region.complete(slot, {"step": step})


def test_another_process_reads_complete_slots(region: Region) -> None:
    _fill(region, 0, 10)
    region.begin(1, 11)
    region.confirm(10)
    region.store_digests(0, {"w": "abc"})
    seen = Region.open(region.path)
    assert seen.rank == 3 and seen.description == {"a": [1, "x"]} and seen.token == region.token
    assert seen.confirmed == 10
    assert seen.slots() == [
        SlotHeader(10, SlotState.COMPLETE),
        SlotHeader(11, SlotState.COPYING),
        SlotHeader(-1, SlotState.EMPTY),
    ]
    assert seen.values(0) == {"step": 10} and seen.digests(0) == {"w": "abc"}
    assert bytes(seen.data(0)[:4]) == (10).to_bytes(4, "little") and len(seen.data(0)) == 8192
    assert (os.stat(region.path).st_mode & 0o777) == 0o600
    region.begin(0, 12)
    assert seen.slots()[0] == SlotHeader(12, SlotState.COPYING) and seen.digests(0) is None
    seen.close()


def test_steps_count_from_0(region: Region) -> None:
    _fill(region, 0, 0)
    assert Region.open(region.path).complete_slots() == {0: 0}
    with pytest.raises(ValueError, match="Step -1 is negative"):
        region.begin(1, -1)


def test_values_of_an_incomplete_slot_are_rejected(region: Region) -> None:
    with pytest.raises(DamagedSnapshot, match="slot 1 is not complete"):
        region.values(1)
    with pytest.raises(ValueError, match="call begin first"):
        region.complete(1, {})
    region.begin(1, 4)
    with pytest.raises(ValueError, match="more values_bytes"):
        region.complete(1, {"x": "y" * 5000})
    with pytest.raises(ValueError, match="has 3 slots"):
        region.data(3)


class Torn(BaseException):
    """A kill within a store."""


@contextmanager
def torn_after(num_bytes: int) -> Iterator[list[bool]]:
    """Truncate all stores of the block together after this many bytes. Yields whether that
    happened."""
    real, left, was_torn = Region._store, [num_bytes], [False]

    def store(self: Region, offset: int, content: bytes) -> None:
        left[0] -= len(content)
        if left[0] < 0:
            real(self, offset, content[: left[0]])
            raise Torn
        real(self, offset, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "_store", store)
        try:
            yield was_torn
        except Torn:
            was_torn[0] = True


@pytest.mark.parametrize("what", ["begin", "complete", "stamp"])
def test_a_store_torn_at_any_byte_hides_no_other_slot(tmp_path: Path, what: str) -> None:
    """Each store of an operation is truncated after every byte: the slot is as before, as after, or
    empty, and the others are unchanged."""
    region = Region.create(tmp_path, 0, {}, 4096, values_bytes=4096)

    def operate() -> None:
        if what == "begin":
            region.begin(1, 12)
        elif what == "complete":
            region.complete(1, {"step": 12})
        else:
            region.store_digests(1, {"w": "0123456789abcdef"})

    ends = 0
    for kept in range(400):
        for slot, step in ((0, 10), (1, 9), (2, 8)):
            _fill(region, slot, step)
        if what == "complete":
            region.begin(1, 12)
        with torn_after(kept) as was_torn:
            operate()
        ends += not was_torn[0]
        slots = region.slots()
        assert slots[0] == SlotHeader(10, SlotState.COMPLETE)
        assert slots[2] == SlotHeader(8, SlotState.COMPLETE)
        assert region.values(0) == {"step": 10} and region.values(2) == {"step": 8}
        if slots[1].state == SlotState.COMPLETE:
            assert region.values(1) == {"step": slots[1].step}
            assert region.digests(1) in (None, {"w": "0123456789abcdef"})
        if what == "stamp":
            assert slots[1] == SlotHeader(9, SlotState.COMPLETE)
    assert 0 < ends < 400
    region.close()


def _adopted(folder: Path, generation_id: str, start: str | None = None) -> Region:
    result = Region.adopt(
        folder, 0, {"generation_id": generation_id}, 4096, values_bytes=4096, generation_id=start
    )
    assert result is not None
    return result


@pytest.mark.parametrize("shared", [False, True])
def test_an_adoption_torn_at_any_byte_loses_no_generation(tmp_path: Path, shared: bool) -> None:
    """The generation from whose step the run resumes has the region, whatever was written."""
    ends, num_bytes = 0, 0
    while ends < 3:
        made = Region.create(tmp_path, 0, {"generation_id": "a"}, 4096, values_bytes=4096)
        _fill(made, 1, 7)
        made.close()
        if shared:
            # Killed before all ranks have adopted; the other ranks have their regions of generation
            # "a".
            _adopted(tmp_path, "b").close()
        with torn_after(num_bytes) as was_torn:
            adopted = _adopted(tmp_path, "c", start="a")
            assert adopted.earlier_generation_ids == (("b", "a") if shared else ("a",))
            adopted.close()
        seen = Region.open(made.path)
        assert seen.complete_slots() == {7: 1} and seen.values(1) == {"step": 7}
        assert "a" in seen.generation_ids and seen.description == {
            "generation_id": seen.generation_ids[0]
        }
        if not was_torn[0]:
            assert seen.generation_ids == ["c", "a"]
            ends += 1
        num_bytes += 1
        seen.close()
    assert num_bytes > 100


def test_a_region_that_all_ranks_adopted_belongs_to_the_last_generation(tmp_path: Path) -> None:
    made = Region.create(tmp_path, 0, {"generation_id": "a"}, 4096, values_bytes=4096)
    _fill(made, 1, 7)
    made.close()
    for generation_id in "bcd":
        adopted = _adopted(tmp_path, generation_id)
        token = adopted.token
        assert adopted.generation_ids[0] == generation_id and len(adopted.generation_ids) == 2
        adopted.finish_takeover()
        seen = Region.open(adopted.path)
        assert (
            seen.generation_ids == adopted.generation_ids == [generation_id] and seen.token == token
        )
        assert seen.complete_slots() == {7: 1}
        seen.close()
        adopted.close()


def test_a_longer_description_is_adopted_if_there_is_space(tmp_path: Path) -> None:
    made = Region.create(tmp_path, 0, {"generation_id": "a", "config": ""}, 4096)
    made.close()
    expected = {"generation_id": "b", "config": "x" * ALIGNMENT}
    adopted = Region.adopt(tmp_path, 0, expected, 4096)
    assert adopted is not None and adopted.description == expected
    adopted.close()
    assert Region.open(made.path).description == expected
    assert Region.adopt(tmp_path, 0, expected | {"config": "x" * 3 * ALIGNMENT}, 4096) is None


def test_damage_is_detected_by_name(region: Region) -> None:
    original = region.path.read_bytes()
    for place in (0, 8, 13, 20, 60, 80, ALIGNMENT, ALIGNMENT + 5):
        raw = bytearray(original)
        raw[place] ^= 1
        region.path.write_bytes(raw)
        with pytest.raises(DamagedSnapshot, match="rank-00003.snapshots"):
            Region.open(region.path)
    for length in (0, 100, ALIGNMENT, len(original) - 1):
        region.path.write_bytes(original[:length])
        with pytest.raises(DamagedSnapshot, match="rank-00003.snapshots"):
            Region.open(region.path)
    region.path.unlink()
    with pytest.raises(DamagedSnapshot, match="cannot be opened"):
        Region.open(region.path)


def test_damaged_values_and_digests_are_detected(region: Region) -> None:
    _fill(region, 0, 10)
    region.store_digests(0, {"w": "abc"})
    raw = region.path.read_bytes()
    for content in (b"10}", b"abc"):
        region._view[raw.index(content)] ^= 1
    with pytest.raises(DamagedSnapshot, match="the values of slot 0"):
        region.values(0)
    assert region.digests(0) is None


def test_digests_that_do_not_fit_beside_the_values_are_refused(region: Region) -> None:
    _fill(region, 0, 10)
    with pytest.raises(ValueError, match="values and digests"):
        region.store_digests(0, {"w": "0" * region.values_bytes})
    assert region.values(0) == {"step": 10} and region.digests(0) is None


def test_too_little_memory_is_an_error_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InsufficientMemory, match="MiB of shared memory, but .* has .* MiB available"
    ) as caught:
        Region.create(tmp_path, 0, {}, 1 << 55)
    assert caught.value.needed > 3 << 55 and caught.value.available < 1 << 50
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(region_file, "_memory_available", lambda: 1 << 20)
    with pytest.raises(InsufficientMemory, match="the machine has 1.0 MiB available"):
        Region.create(tmp_path, 0, {}, 1 << 20)
    monkeypatch.setattr(region_file, "_memory_available", lambda: None)
    monkeypatch.setattr(region_file, "_cgroup_available", lambda: 2 << 20)
    with pytest.raises(InsufficientMemory, match="cgroup has 2.0 MiB available"):
        Region.create(tmp_path, 0, {}, 1 << 20)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs")
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_full_tmpfs_is_not_a_bus_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """Also if it fills up between the check and the reservation."""
    small = tmp_path / "small"
    small.mkdir()
    mount = shutil.which("mount") or "mount"
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "none", small], check=False)
    if made.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        if not is_checked:
            monkeypatch.setattr(region_file, "_free_on", lambda folder: 1 << 40)
        with pytest.raises(InsufficientMemory, match="snapshots of rank 0"):
            Region.create(small, 0, {}, 1 << 20)
        assert os.listdir(small) == []
        Region.create(small, 0, {}, 4096, values_bytes=4096).close()
    finally:
        subprocess.run(["umount", small], check=True)


def test_the_region_of_an_earlier_process_is_replaced(region: Region) -> None:
    _fill(region, 0, 10)
    other = Region.create(region.path.parent, 3, {}, 4096)
    assert Region.open(region.path).slots()[0].state == SlotState.EMPTY
    # A process that still maps the old region, such as a writer that flushes, is not affected.
    assert region.values(0) == {"step": 10}
    assert other.token != region.token
    other.close()


def test_a_region_with_too_little_space_for_values_is_not_adopted(tmp_path: Path) -> None:
    made = Region.create(tmp_path, 0, {"generation_id": "1"}, 4096, values_bytes=4096)
    made.close()
    expected = {"generation_id": "2"}
    assert Region.adopt(tmp_path, 0, expected, 4096, values_bytes=4097) is None
    adopted = Region.adopt(tmp_path, 0, expected, 4096, values_bytes=4096)
    assert adopted is not None and adopted.description == expected
    adopted.close()


def test_a_description_with_another_value_is_damaged(region: Region) -> None:
    """Although it can be read."""
    raw = bytearray(region.path.read_bytes())
    raw[raw.index(b'"x"') + 1] ^= 1
    region.path.write_bytes(raw)
    with pytest.raises(DamagedSnapshot, match="description's checksum is wrong"):
        Region.open(region.path)


def test_a_tensor_outside_of_the_slot_is_damage(tmp_path: Path) -> None:
    described = description(tmp_path, 0, 1, run_id="ab12")
    slot_bytes = slot_bytes_of(described)
    assert RegionDescription.from_dict(described, slot_bytes=slot_bytes).rank == 0
    with pytest.raises(DamagedSnapshot, match="invalid"):
        RegionDescription.from_dict(described, slot_bytes=slot_bytes - 1)
    with pytest.raises(DamagedSnapshot, match="rank 1 of 1"):
        RegionDescription.from_dict({**described, "rank": 1}, slot_bytes=slot_bytes)


@pytest.mark.parametrize("num_slots", [0, MAX_SLOTS + 1])
def test_a_region_has_slots_and_may_have_no_data(tmp_path: Path, num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"{num_slots} slots of 0 and .* needed are 1 to"):
        Region.create(tmp_path, 0, {}, 0, num_slots=num_slots)
    empty = Region.create(tmp_path, 0, {}, 0, num_slots=1)
    assert len(empty.data(0)) == 0
    empty.close()
