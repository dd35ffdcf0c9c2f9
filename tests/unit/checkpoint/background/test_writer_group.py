"""Several replicas write a checkpoint together: each byte once, evenly, by real writers."""

import json
import secrets
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.harness.snapshots import Trainers, description, trainers
from torchtitan_lite.checkpoint.background.save import (
    SINGLE_REPLICA,
    WriterGroup,
    assign_tensors,
    rank_share,
)
from torchtitan_lite.checkpoint.shared_memory.description import HeldTensor, RegionDescription

_LAYOUT = {
    "mesh": {"shape": [2], "axes": ["dp_shard"], "holders": ["rank-00000.safetensors"] * 2},
    "placements": ["S(0)"],
    "shard_order": [],
}


def held(name: str, elements: int) -> HeldTensor:
    shape = (elements,)
    return HeldTensor(
        name=name,
        dtype="F32",
        shape=shape,
        layout=0,
        local_shape=shape,
        offset=0,
        bytes=4 * elements,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_bytes_are_divided_evenly(count: int) -> None:
    tensors = [held(f"t{number}", 1000 + number % 13) for number in range(100)]
    owners = assign_tensors(tensors, count)
    loads = [sum(t.bytes for t in tensors if owners[t.name] == one) for one in range(count)]
    assert max(loads) - min(loads) <= 4 * 1012
    # Another replica may list the replicas in another order.
    assert assign_tensors(list(reversed(tensors)), count) == owners


def _about(rank: int) -> RegionDescription:
    described = description("/nowhere", rank, 2, run_id=secrets.token_hex(16))
    described["file_layouts"] = [
        {
            **_LAYOUT,
            "mesh": {
                **_LAYOUT["mesh"],
                "holders": ["rank-00000.safetensors", "rank-00001.safetensors"],
            },
        }
    ]
    return RegionDescription.from_dict(described, slot_bytes=1 << 30)


def test_ranks_of_all_replicas_are_one_row_of_writers() -> None:
    shares = [
        rank_share(_about(rank), WriterGroup(index, 3, "abc"))
        for index in range(3)
        for rank in range(2)
    ]
    assert [share.rank for share in shares] == list(range(6))
    assert {share.world_size for share in shares} == {6}
    assert [share.is_leader for share in shares] == [True, *[False] * 5]
    assert {share.generation_id for share in shares} == {"abc"}
    names = [(share.file_name, box.tensor) for share in shares for box in share.boxes]
    of_rank_0 = [box.tensor for box in _about(0).boxes]
    assert sorted(tensor for _, tensor in names) == sorted([*of_rank_0, "model.large"])
    for share in shares:
        first = share.rank // 2 * 2
        holders = share.file_layouts[0]["mesh"]["holders"]
        assert holders == [f"rank-{first + rank:05d}.safetensors" for rank in range(2)]


def test_a_single_replica_writes_everything() -> None:
    about = _about(0)
    assert rank_share(about, SINGLE_REPLICA) is about


def _save(run: Trainers, step: int, writer_group: WriterGroup, token: str) -> None:
    run.writers[0].save(0, step, token, writer_group=writer_group)


def _two(tmp_path: Path, root: Path) -> list[AbstractContextManager[Trainers]]:
    layout = {**_LAYOUT, "mesh": {**_LAYOUT["mesh"], "shape": [1]}}
    layout["mesh"]["holders"] = ["rank-00000.safetensors"]
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    return [trainers(folder, root, 1, layout=layout) for folder in folders]


def test_two_replicas_write_one_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    first, second = _two(tmp_path, root)
    with first as one, second as other:
        for run in (one, other):
            run.start(recovers=False)
            run.snapshot(0, 7)
        _save(other, 7, WriterGroup(1, 2, "ab12"), "ab12-1")
        assert other.writers[0].wait_for("written", 60)[-1]["written"] == 7
        assert not (root / "step-7").exists()
        _save(one, 7, WriterGroup(0, 2, "ab12"), "ab12-1")
        assert one.writers[0].wait_for("committed", 60)[-1]["committed"] == 7
        manifest = json.loads((root / "step-7" / "manifest.json").read_text())
        files = {
            name: {box["file"] for box in entry["boxes"]}
            for name, entry in manifest["tensors"].items()
        }
        assert files["model.large"] != files["model.small"]
        assert manifest["values"] == {"train_state": {"step": 7}}
        assert list(manifest["rng"]) == ["0"]


def test_remaining_replicas_write_the_part_of_a_departed_one(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    first, second = _two(tmp_path, root)
    with first as one, second as other:
        one.start(recovers=False)
        one.snapshot(0, 7)
        _save(one, 7, WriterGroup(0, 2, "ab12"), "ab12-1")
        assert one.writers[0].wait_for("written", 60)[-1]["written"] == 7
        # The other replica is lost and never writes.
        one.writers[0].abandon(7)
        one.writers[0].wait_for("abandoned", 60)
        _save(one, 7, SINGLE_REPLICA, "cd34-1")
        assert one.writers[0].wait_for("committed", 60)[-1]["committed"] == 7
        assert sorted(path.name for path in (root / "step-7").iterdir()) == [
            "manifest.json",
            "rank-00000.safetensors",
        ]
        assert other.writers == []


def test_without_a_token_the_first_replica_writes_for_all() -> None:
    first, second = WriterGroup(0, 2), WriterGroup(1, 2)
    assert (first.writes, second.writes) == (True, False)
    assert first.active == second.active == SINGLE_REPLICA
    named = WriterGroup(1, 2, "ab12")
    assert named.writes and named.active == named
