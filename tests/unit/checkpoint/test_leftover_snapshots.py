"""Snapshots that an earlier process left in shared memory."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.snapshots import description, slot_bytes_of, snapshot
from torchtitan_lite.checkpoint import leftover_snapshots
from torchtitan_lite.checkpoint.async_saver import AsynchronousSaver, _Save
from torchtitan_lite.checkpoint.convert.hugging_face.folder import saved_assets
from torchtitan_lite.checkpoint.history.identity import replica_run_id
from torchtitan_lite.checkpoint.history.snapshot_index import HeldPart, HeldRegion, Position
from torchtitan_lite.checkpoint.leftover_snapshots import (
    LeftoverSnapshot,
    SnapshotOrigin,
    newest_leftover,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.core.errors import DamagedCheckpoint


@pytest.mark.parametrize(("copied_generation_id", "kept"), [("old", "old"), (None, "new")])
def test_regions_must_belong_to_the_generation_of_the_copies(
    copied_generation_id: str | None, kept: str
) -> None:
    origin = SnapshotOrigin("new", 5, copied_generation_id=copied_generation_id)
    assert origin.generation_id_to_keep == kept


_OWN, _COPIED = Position(0, 5), Position(0, 3)


@pytest.mark.parametrize(
    ("generation_ids", "copied_generation_id", "kept"),
    [
        (["new"], None, {_OWN: 0, _COPIED: 1}),
        (["new"], "old", {_OWN: 0}),
        (["old"], "old", {_COPIED: 1}),
        (["new", "old"], "old", {_OWN: 0, _COPIED: 1}),
        (["another"], "old", {}),
    ],
)
def test_slots_of_another_generation_are_not_kept(
    generation_ids: list[str], copied_generation_id: str | None, kept: dict[Position, int]
) -> None:
    region = SimpleNamespace(
        rank=1,
        earlier_generation_ids=(),
        generation_ids=generation_ids,
        complete_slots=lambda: {5: 0, 3: 1},
    )
    saver: Any = SimpleNamespace(_region=region, buddies=object())
    origin = SnapshotOrigin(
        "new", 5, copied_position=_COPIED, copied_generation_id=copied_generation_id
    )
    assert AsynchronousSaver.slots_to_keep(saver, origin) == kept


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_part_whose_checksum_does_not_match_is_named_and_not_used_again(
    tmp_path: Path, is_damaged: bool
) -> None:
    described = description(tmp_path, 0, 1, run_id="a1b2")
    region = Region.create(tmp_path, 0, described, slot_bytes_of(described), values_bytes=8192)
    snapshot(region, 0, 7)
    (held,) = (one for one in described["tensors"] if one["name"] == "model.tiny")
    data = region.data(0)[held["offset"] : held["offset"] + held["bytes"]]
    digest = leftover_snapshots.xxhash.xxh3_64_hexdigest(data)
    region.store_digests(0, {"model.tiny": digest})
    if is_damaged:
        data[2] ^= 1
    holder, saved = "a region", SimpleNamespace(step=7)
    unused: Any = {}
    untyped: Any = saved
    found = LeftoverSnapshot(SnapshotOrigin("a", 7), untyped, unused, {holder: (region, 0)}, unused)
    if is_damaged:
        with pytest.raises(DamagedCheckpoint, match=r"model\.tiny in slot 0"):
            found.part("model.tiny", holder)
    else:
        assert found.part("model.tiny", holder).tolist() == list(data)
    assert found.damaged == ({HeldPart(0, False, Position(0, 7))} if is_damaged else set())


@pytest.mark.parametrize(("rank", "reports"), [(0, False), (1, True), (2, False), (3, False)])
def test_one_rank_per_machine_reports_its_regions(
    monkeypatch: pytest.MonkeyPatch, rank: int, reports: bool
) -> None:
    """Ranks 1 to 3 are on the machine of the region."""
    region = SimpleNamespace(
        held=lambda saver, is_copy: HeldRegion(saver, is_copy, ["a"], 9, []),
        region=SimpleNamespace(close=lambda: None),
    )
    sent: list[bytes] = []
    monkeypatch.setattr(leftover_snapshots, "all_gather_ints", lambda mine: [4, 7, 7, 7])
    monkeypatch.setattr(
        leftover_snapshots, "all_gather_bytes", lambda text: sent.append(text) or [b""] * 4
    )
    regions = {(5, False): region} if rank else {}
    monkeypatch.setattr(leftover_snapshots, "_regions", lambda run_id: regions)
    lineage: Any = SimpleNamespace(permitted=lambda: None)
    assert newest_leftover("a run", rank, lineage) is None
    assert bool(json.loads(sent[0] or b"[]")) is reports


def test_only_responses_about_the_present_attempt_count() -> None:
    saver: Any = SimpleNamespace(_save=_Save(7, 0, "ab-7x2", {}, urgent=False))
    for response in ({"committed": 7}, {"failed": 7, "error": "no space"}):
        AsynchronousSaver._handle(saver, {**response, "token": "ab-7x1"})
        assert not saver._save.committed and not saver._save.failed
    AsynchronousSaver._handle(saver, {"committed": 7, "token": "ab-7x2"})
    assert saver._save.committed
    saver._save = None
    AsynchronousSaver._handle(saver, {"committed": 7, "token": "ab-7x2"})


def test_a_rank_without_a_region_has_no_generators() -> None:
    found: Any = SimpleNamespace(position="here")
    region = SimpleNamespace(values=lambda slot: {"rng": f"slot {slot}"})
    mine: Any = {1: SimpleNamespace(region=region, slots={"here": 2})}
    assert leftover_snapshots._generators(found, mine, 1) == {"1": "slot 2"}
    assert leftover_snapshots._generators(found, mine, 0) == {}


def test_a_replica_has_snapshots_of_its_own() -> None:
    names = [replica_run_id("run", replica) for replica in range(3)]
    assert names[0] == "run" and len(set(names)) == 3


def test_the_tokenizer_beside_a_step_is_found(tmp_path: Path) -> None:
    step = str(tmp_path / "step-3")
    assert saved_assets(step) is None and saved_assets(f"memory://{step}") is None
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "tokenizer.json").touch()
    assert saved_assets(step) == tmp_path / "assets"
