"""A small checkpoint of two files, written by one process in the format of two ranks."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import Shard

from torchtitan_lite.checkpoint.format import MANIFEST
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.attempts import manifest_bytes
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.checkpoint.storage.safetensors_file import PartBox
from torchtitan_lite.checkpoint.tensors import DTYPE_NAMES
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, layout_to_json

TWO_FILES = ("rank-00000.safetensors", "rank-00001.safetensors")
_TOKEN = "0123456789ab-1"


def write_checkpoint(root: Path | str, step: int) -> dict[str, torch.Tensor]:
    """Write the checkpoint of `step` into `root`, and return its full tensors."""
    tensors = _tensors()
    sharded = Layout(HolderMesh((2,), TWO_FILES, ("dp_shard",)), [Shard(0)])
    first = Layout(HolderMesh((), TWO_FILES[:1]), [])
    storage = open_storage(str(root))
    parts = []
    for rank, file in enumerate(TWO_FILES):
        described: dict[str, Any] = {}
        boxes: list[PartBox] = []
        views: list[memoryview] = []
        for name, tensor in tensors.items():
            layout = sharded if tensor.dim() else first
            entry = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "layout": int(layout is first),
                "boxes": [],
            }
            for box in layout.boxes(tensor.shape, file):
                part = tensor[box.slices].contiguous()
                raw = part.reshape(-1).view(torch.uint8).numpy().data
                boxes.append(PartBox(name, entry["dtype"], box.size, 0, len(raw)))
                views.append(raw)
                entry["boxes"].append({"offset": box.offset, "size": box.size, "file": file})
                described[name] = entry
            if tensor.numel() == 0:
                described[name] = entry
        written = storage.write(step, _TOKEN, file, boxes, views)
        places = (box for entry in described.values() for box in entry["boxes"])
        for box, place in zip(places, written, strict=True):
            box |= {"bytes": [place.first, place.end], "xxh3": place.xxh3}
        part = {
            "rank": rank,
            "rng": {"python": [rank, 0.5]},
            "layouts": [layout_to_json(sharded), layout_to_json(first)],
            "tensors": described,
        }
        parts.append(attempts.put_part(storage, step, _TOKEN, rank, part))
    base = {
        "mesh": {"dp_shard": 2},
        "values": {"train_state": {"step": step}, "dataloader": {"cursor": 8 * step}},
        "config": {"seed": 1},
        "versions": {"torchtitan_lite": "test"},
    }
    attempts.commit(storage, step, _TOKEN, parts, base)
    return tensors


def manifest_with_checksum(raw: dict[str, Any]) -> bytes:
    """Return a manifest with its correct checksum."""
    rest = {key: value for key, value in raw.items() if key != "xxh3"}
    if raw.get("version") != 2:
        return manifest_bytes(rest)
    digest = xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())
    return json.dumps(rest | {"xxh3": digest}).encode()


def replace_manifest(folder: Path, raw: dict[str, Any]) -> None:
    """Replace the manifest of a checkpoint, with a correct checksum."""
    (folder / MANIFEST).write_bytes(manifest_with_checksum(raw))


def damage_file(folder: Path, rng: random.Random) -> tuple[str, str]:
    """Flip a bit of a random file, truncate it or delete it; return its name and the damage."""
    path = rng.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    kind = rng.choices(["flip", "truncate", "delete"], [8, 3, 1])[0]
    if kind == "flip":
        position, bit = rng.randrange(len(content)), rng.randrange(8)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        return path.name, f"bit {bit} of byte {position} flipped"
    if kind == "truncate":
        length = rng.randrange(len(content))
        path.write_bytes(content[:length])
        return path.name, f"truncated to {length} bytes"
    path.unlink()
    return path.name, "deleted"


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.weight": torch.randn(300, 7, generator=generator),
        "model.odd": torch.randn(3, 5, generator=generator).bfloat16(),
        "model.one": torch.randn(1, 4, generator=generator, dtype=torch.float64),
        "model.none": torch.empty(0, 4),
        "model.flags": torch.randint(0, 2, (9,), generator=generator, dtype=torch.bool),
        "model.count": torch.randint(0, 9, (), generator=generator),
        "optimizer.weight.momentum": torch.randn(300, 7, generator=generator),
    }
