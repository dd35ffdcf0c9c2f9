"""Small snapshots for tests of the writer: shared-memory regions of trainers, without torch."""

import json
import math
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_lite.checkpoint.background.channel import WriterSettings
from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.checkpoint.format import MANIFEST
from torchtitan_lite.checkpoint.shared_memory.folder import shared_memory_folder
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.checkpoint.storage.attempts import checksum_matches

LARGE = 3 * 4096 + 512


def generation_ids_of(path: Path) -> list[str]:
    """Return the generations of a run that used a region."""
    region = Region.open(path)
    generation_ids = region.generation_ids
    region.close()
    return generation_ids


def description(
    root: Path | str,
    rank: int,
    world_size: int,
    *,
    run_id: str,
    generation_id: str = "5e55",
    large_elements: int = LARGE,
    layout: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe a rank that holds its rows of a large tensor; the leader also holds small
    tensors."""
    layout = layout or {"shards": world_size}
    local: list[tuple[str, str, list[int], list[int], list[int]]] = [
        ("model.large", "F32", [world_size, large_elements], [rank, 0], [1, large_elements])
    ]
    if rank == 0:
        local.append(("model.small", "BF16", [3], [0], [3]))
        local.append(("model.tiny", "U8", [5], [0], [5]))
    tensors, boxes, start = [], [], 0
    for name, dtype, shape, offset, size in local:
        width = {"F32": 4, "BF16": 2, "U8": 1}[dtype]
        num_bytes = math.prod(size) * width
        tensors.append(
            {
                "name": name,
                "dtype": dtype,
                "shape": shape,
                "layout": 0,
                "local_shape": size,
                "offset": start,
                "bytes": num_bytes,
            }
        )
        boxes.append(
            {
                "tensor": name,
                "dtype": dtype,
                "shape": shape,
                "layout": 0,
                "offset": offset,
                "size": size,
                "start": start,
                "bytes": num_bytes,
            }
        )
        start += num_bytes
    tensors.append(
        {
            "name": "model.none",
            "dtype": "F32",
            "shape": [0, 4],
            "layout": 0,
            "local_shape": [0, 4],
            "offset": 0,
            "bytes": 0,
        }
    )
    return {
        "run_id": run_id,
        "generation_id": generation_id,
        "rank": rank,
        "world_size": world_size,
        "root": str(root),
        "is_leader": rank == 0,
        "mesh": {"dp_shard": world_size},
        "config": {"seed": 1},
        "versions": {"torchtitan_lite": "test"},
        "layouts": [layout],
        "tensors": tensors,
        "file_layouts": [layout],
        "file": {"name": f"rank-{rank:05d}.safetensors", "boxes": boxes},
    }


def slot_bytes_of(described: dict[str, Any]) -> int:
    return max((box["start"] + box["bytes"] for box in described["file"]["boxes"]), default=0)


def content(rank: int, step: int, num_bytes: int) -> bytes:
    """Return the content of a rank's slot at a step."""
    return random.Random(f"{rank} {step}").randbytes(num_bytes)


def snapshot(region: Region, slot: int, step: int) -> None:
    """Take a snapshot, as a trainer does after a step."""
    region.begin(slot, step)
    used = slot_bytes_of(region.description)
    region.data(slot)[:used] = content(region.rank, step, used)
    values = {"values": {"train_state": {"step": step}}, "rng": {"rank": region.rank, "step": step}}
    region.complete(slot, values)


class Trainers:
    """Regions and writers of all ranks of a run on this machine."""

    def __init__(self, base: Path, root: Path | str, world_size: int, **options: Any) -> None:
        self.root = root
        self.run_id = options.pop("run_id", secrets.token_hex(16))
        self.folder = shared_memory_folder(self.run_id, base=base)
        self.regions: list[Region] = []
        for rank in range(world_size):
            described = description(root, rank, world_size, run_id=self.run_id, **options)
            region = Region.create(
                self.folder, rank, described, slot_bytes_of(described), values_bytes=8192
            )
            self.regions.append(region)
        self.writers: list[WriterProcess] = []

    def start(self, command: list[str] | None = None, **settings: Any) -> None:
        """Start a writer for every rank and block until all are ready."""
        for region in self.regions:
            writer = WriterProcess(region.path, WriterSettings(**settings), command)
            writer.start()
            self.writers.append(writer)
        for writer in self.writers:
            assert any("ready" in message for message in writer.wait_for("ready", 100))

    def snapshot(self, slot: int, step: int) -> None:
        for region in self.regions:
            snapshot(region, slot, step)

    def save(self, slot: int, step: int, token: str | None = None) -> None:
        for writer in self.writers:
            writer.save(slot, step, token)

    def disconnect(self) -> None:
        """Disconnect all writers, as when the trainers are killed."""
        for writer in self.writers:
            orphan(writer)

    def close(self) -> None:
        for writer in self.writers:
            writer.close(timeout_s=60)
        for region in self.regions:
            region.close()
            region.unlink()


def orphan(writer: WriterProcess) -> None:
    """Close a writer's input without "stop"."""
    process = writer._process
    assert process is not None and process.stdin is not None
    process.stdin.close()


@contextmanager
def trainers(base: Path, root: Path | str, world_size: int, **options: Any) -> Iterator[Trainers]:
    run = Trainers(base, root, world_size, **options)
    try:
        yield run
    finally:
        run.close()


def read_safetensors(raw: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Return (dtype, shape, bytes) by name, after checking that the data has no gaps."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    position, tensors = 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, end = entry["data_offsets"]
        assert first == position
        position = end
        tensors[name] = (entry["dtype"], entry["shape"], data[first:end])
    assert position == len(data)
    return tensors


def verify(folder: Path, run_bytes: bool = True) -> dict[str, Any]:
    """Check that a checkpoint is complete with correct checksums and contents; return its
    manifest."""
    text = (folder / MANIFEST).read_bytes()
    manifest = json.loads(text)
    assert checksum_matches(text)
    files = {box["file"] for entry in manifest["tensors"].values() for box in entry["boxes"]}
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *files}
    raw = {name: (folder / name).read_bytes() for name in files}
    for name in files:
        read_safetensors(raw[name])
    for entry in manifest["tensors"].values():
        num_elements = 0
        for box in entry["boxes"]:
            first, end = box["bytes"]
            assert xxhash.xxh3_64_hexdigest(raw[box["file"]][first:end]) == box["xxh3"]
            num_elements += math.prod(box["size"])
        assert num_elements == math.prod(entry["shape"])
    step = manifest["step"]
    assert manifest["values"]["train_state"]["step"] == step
    assert folder.name == f"step-{step}"
    if run_bytes:
        for name in files:
            rank = int(name[5:10])
            data = b"".join(bytes_ for _, _, bytes_ in read_safetensors(raw[name]).values())
            assert data == content(rank, step, len(data))
            assert manifest["rng"][str(rank)] == {"rank": rank, "step": step}
    return manifest
