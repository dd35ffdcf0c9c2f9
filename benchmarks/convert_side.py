"""One conversion in a process of its own: its seconds, memory and bytes, without its imports.

python -m benchmarks.convert_side SIDE --source DIR --target DIR --json PATH

The files that it reads are in the system's cache. Memory is the process's greatest resident set
above that before the conversion, mapped files included.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.processes import THREADS
from torchtitan_lite.checkpoint import Snapshot, StoredSnapshot, read_tensor, tensor_bytes
from torchtitan_lite.checkpoint.hugging_face import (
    BLOCK_BYTES,
    HuggingFaceExport,
    HuggingFaceFolder,
    HuggingFaceImport,
    HuggingFaceSnapshot,
)
from torchtitan_lite.checkpoint.storage import open_parent_storage, open_storage
from torchtitan_lite.config import Config, recorded_config
from torchtitan_lite.models import hugging_face_model, model_spec, read_hugging_face_config

_WORKERS = 2
_SHARD_BYTES = 300 * 10**6


def ours_in(source: Path, target: Path) -> None:
    """As scripts.convert_from_hf does."""
    model = hugging_face_model(read_hugging_face_config(source), str(source))
    HuggingFaceImport(
        source=HuggingFaceSnapshot(
            *open_parent_storage(str(source)), model_spec(model), block_bytes=BLOCK_BYTES
        ),
        storage=open_storage(str(target)),
        dtype=None,
        run_config=Config(model=model).model_dump(),
    ).run(num_workers=_WORKERS, written=_nobody)


def ours_out(source: Path, target: Path) -> None:
    """As scripts.convert_to_hf does."""
    snapshot = StoredSnapshot(*open_parent_storage(str(source / "step-0")))
    model = recorded_config(snapshot.manifest.config, snapshot.where).model
    HuggingFaceExport(snapshot, target, model_spec(model), max_shard_bytes=_SHARD_BYTES).run(
        num_workers=_WORKERS, written=_nobody
    )


def floor(source: Path, target: Path) -> None:
    """Each file loaded and saved by the library, which does not wait for the disk."""
    target.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), target / file.name, metadata={"format": "pt"})


def durable_floor(source: Path, target: Path) -> None:
    """The same, on the disk when it ends."""
    floor(source, target)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def dcp_in(source: Path, target: Path) -> None:
    """By torch DCP's reader of such folders, as torchtitan's conversion calls it."""
    found = HuggingFaceFolder(*open_parent_storage(str(source))).tensors
    state: dict[str, Any] = {
        key: torch.empty(one.tensor.shape, dtype=one.tensor.dtype) for key, one in found.items()
    }
    load(state, storage_reader=HuggingFaceStorageReader(str(source)), no_dist=True)
    save(state, checkpoint_id=target, no_dist=True)


def dcp_out(source: Path, target: Path) -> None:
    """The way back, by its writer."""
    writer = HuggingFaceStorageWriter(path=str(target), save_distributed=False)
    save(_loaded(source), storage_writer=writer, no_dist=True)


def _loaded(source: Path) -> dict[str, Any]:
    """What a DCP checkpoint holds."""
    state: dict[str, Any] = {
        key: torch.empty(one.size, dtype=one.properties.dtype)
        for key, one in FileSystemReader(source).read_metadata().state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    load(state, checkpoint_id=source, no_dist=True)
    return state


SIDES: dict[str, Callable[[Path, Path], None]] = {
    "ours in": ours_in,
    "ours out": ours_out,
    "floor": floor,
    "durable floor": durable_floor,
    "DCP in": dcp_in,
    "DCP out": dcp_out,
}


def _nobody(count: int) -> None:
    """Nobody looks at the progress."""


def checksum(folder: Path) -> str:
    """Of the bytes of all weights in a folder of any side, in the order of their sizes and first
    bytes, since names differ."""
    tensors: list[torch.Tensor] = []
    if (folder / "step-0").is_dir():
        snapshot: Snapshot = StoredSnapshot(*open_parent_storage(str(folder / "step-0")))
        tensors = [read_tensor(snapshot, name) for name in snapshot.tensors]
    elif (folder / ".metadata").is_file():
        tensors = list(_loaded(folder).values())
    else:
        for file in folder.glob("*.safetensors"):
            tensors += load_file(file).values()
    digests = sorted(xxhash.xxh3_64_hexdigest(tensor_bytes(tensor)) for tensor in tensors)
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _bytes() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert once, and write what it took."""
    parser = argparse.ArgumentParser(description="One conversion.")
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(arguments)
    # Each worker of ours is a thread, and no operation has threads of its own.
    torch.set_num_threads(THREADS)
    # So that the greatest resident set counts from here.
    Path("/proc/self/clear_refs").write_text("5")
    memory, io = _status("VmRSS"), _bytes()
    began_s = time.perf_counter()
    SIDES[given.side](given.source, given.target)
    seconds = time.perf_counter() - began_s
    after = _bytes()
    found = {
        "s": seconds,
        "memory": _status("VmHWM") - memory,
        "read": after["rchar"] - io["rchar"],
        "written": after["wchar"] - io["wchar"],
        "threads": torch.get_num_threads(),
        "checksum": checksum(given.target),
    }
    given.json.write_text(json.dumps(found))
    if given.target.is_dir() and given.side != "ours in" and given.side != "DCP in":
        shutil.rmtree(given.target)


if __name__ == "__main__":
    main()
