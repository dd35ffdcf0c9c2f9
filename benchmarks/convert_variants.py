"""Variants of converting and loading a Hugging Face folder, and the folder of random weights.

Each conversion is measured in a process of its own, without its imports. The files that it reads
are in the page cache. Memory is the peak resident set size of the process above that before the
conversion, including mapped files.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from math import prod
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

from benchmarks.checkpoint_state import sharded, sharding_mesh
from benchmarks.processes import THREADS
from benchmarks.worker import alternate, io_bytes, status_bytes, timed, wall_s
from torchtitan_lite import checkpoint
from torchtitan_lite.checkpoint import (
    Snapshot,
    StoredSnapshot,
    read_tensor,
    recorded_config,
    tensor_bytes,
)
from torchtitan_lite.checkpoint.convert.conversion import expected_shapes
from torchtitan_lite.checkpoint.convert.hugging_face import (
    BLOCK_BYTES,
    HuggingFaceExport,
    HuggingFaceFolder,
    HuggingFaceImport,
    HuggingFaceSnapshot,
    export_on_all_ranks,
)
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import expand_key, match_key
from torchtitan_lite.checkpoint.storage import open_parent_storage, open_storage
from torchtitan_lite.config import Config
from torchtitan_lite.models import hugging_face_model, model_spec, read_hugging_face_config
from torchtitan_lite.models.llama3 import Llama3Dims, spec_of
from torchtitan_lite.nn.spec import ModelSpec

WORKERS = 2
_BYTES = torch.bfloat16.itemsize
_SHARD_BYTES = 300 * 10**6


def spec_of_size(num_mb: int) -> ModelSpec:
    """A Llama of about `num_mb` megabytes; its token embeddings are a tenth of that."""
    dim = 2048 if num_mb >= 500 else 512
    vocab_size = num_mb * 10**5 // (dim * _BYTES)
    dims = Llama3Dims(
        dim=dim,
        num_layers=1,
        num_heads=dim // 64,
        num_kv_heads=dim // 256,
        hidden_dim=dim * 11 // 4,
        vocab_size=vocab_size,
    )
    block = spec_of(dims, "block").cost(1).num_params - 2 * vocab_size * dim
    num_layers = max(1, round((num_mb * 10**6 / _BYTES - 2 * vocab_size * dim) / block))
    return spec_of(Llama3Dims(**{**vars(dims), "num_layers": num_layers}), f"{num_mb} MB")


def write_model(folder: str, num_mb: int, num_shards: int) -> None:
    """Write a folder of random weights in bfloat16, in `num_shards` files."""
    target, spec = Path(folder), spec_of_size(num_mb)
    assert spec.hugging_face is not None
    target.mkdir(parents=True)
    parameters, _ = expected_shapes(spec)
    total = sum(map(prod, parameters.values())) * _BYTES
    torch.manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, shape in parameters.items():
        rule, numbers = match_key(spec.hugging_face.keys, name)
        (key,) = expand_key(rule.forms[0], numbers, shape)
        if size >= total * len(shards) / num_shards:
            shards.append({})
        shards[-1][key] = torch.randn(shape, dtype=torch.bfloat16)
        size += prod(shape) * _BYTES
    files = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, target / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {**spec.hugging_face.config, "torch_dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))


def ours_in(source: Path, target: Path) -> None:
    """Import as scripts.convert_from_hf does."""
    model = hugging_face_model(read_hugging_face_config(source), str(source))
    HuggingFaceImport(
        source=HuggingFaceSnapshot(
            HuggingFaceFolder(*open_parent_storage(str(source))),
            model_spec(model),
            block_bytes=BLOCK_BYTES,
        ),
        storage=open_storage(str(target)),
        dtype=None,
        run_config=Config(model=model).model_dump(),
    ).run(num_workers=WORKERS, written=_ignore_progress)


def ours_out(source: Path, target: Path) -> None:
    """Export as scripts.convert_to_hf does."""
    _new_export(source, target, _SHARD_BYTES).run(num_workers=WORKERS, written=_ignore_progress)


def _new_export(source: Path, target: Path, max_shard_bytes: int) -> HuggingFaceExport:
    snapshot = StoredSnapshot(*open_parent_storage(str(source / "step-0")))
    model = recorded_config(snapshot.manifest.config, snapshot.where).model
    return HuggingFaceExport(snapshot, target, model_spec(model), max_shard_bytes=max_shard_bytes)


def floor(source: Path, target: Path) -> None:
    """Load and save each file by the safetensors library, which does not wait for the disk."""
    target.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), target / file.name, metadata={"format": "pt"})


def durable_floor(source: Path, target: Path) -> None:
    """Do the same, and wait for the disk."""
    floor(source, target)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def dcp_in(source: Path, target: Path) -> None:
    """Import by torch DCP's Hugging Face reader, as torchtitan's conversion does."""
    tensors = HuggingFaceFolder(*open_parent_storage(str(source))).tensors
    state: dict[str, Any] = {
        key: torch.empty(located.tensor.shape, dtype=located.tensor.dtype)
        for key, located in tensors.items()
    }
    load(state, storage_reader=HuggingFaceStorageReader(str(source)), no_dist=True)
    save(state, checkpoint_id=target, no_dist=True)


def dcp_out(source: Path, target: Path) -> None:
    """Export by torch DCP's Hugging Face writer."""
    writer = HuggingFaceStorageWriter(path=str(target), save_distributed=False)
    save(_loaded(source), storage_writer=writer, no_dist=True)


def _loaded(source: Path) -> dict[str, Any]:
    """The tensors of a DCP checkpoint."""
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in FileSystemReader(source).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, checkpoint_id=source, no_dist=True)
    return state


CONVERSIONS: dict[str, Callable[[Path, Path], None]] = {
    "ours in": ours_in,
    "ours out": ours_out,
    "floor": floor,
    "durable floor": durable_floor,
    "DCP in": dcp_in,
    "DCP out": dcp_out,
}


def _ignore_progress(count: int) -> None:
    """Do nothing."""


def _checksum(folder: Path) -> str:
    """A checksum of the bytes of all weights in a folder of any format, without their names."""
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


def measure_loads(source: str, rounds: int, port: int) -> dict[str, Any]:
    """Load a Hugging Face folder: the shards of this rank, and all of it by safetensors."""
    torch.set_num_threads(THREADS)
    mesh = sharding_mesh(port=port)
    folder = Path(source)
    files = sorted(folder.glob("*.safetensors"))
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), source))
    parameters, _ = expected_shapes(spec)
    zeros = partial(torch.zeros, dtype=torch.bfloat16)
    live = {f"model.{name}": sharded(shape, mesh, zeros) for name, shape in parameters.items()}
    num_read = 0

    def ours() -> None:
        nonlocal num_read
        before = io_bytes("rchar")
        storage, name = open_parent_storage(source)
        snapshot = HuggingFaceSnapshot(
            HuggingFaceFolder(storage, name), spec, num_blocks=mesh.world_size
        )
        checkpoint.load(snapshot, dict(live), {"model"}, mesh)
        storage.close()
        num_read = io_bytes("rchar") - before

    def load_all() -> None:
        for file in files:
            for tensor in load_file(file).values():
                # It is mapped until it is read.
                tensor.clone()

    seconds = alternate(timed({"ours": ours, "safetensors": load_all}, mesh.barrier), rounds)
    # The sum over ranks is that of all weights.
    bits = sum(bit_sum(tensor.to_local()) for tensor in live.values())
    return {**seconds, "read": num_read, "threads": torch.get_num_threads(), "bit_sum": bits}


def measure_shared_export(
    source: str, folder: str, num_mb: int, rounds: int, port: int
) -> dict[str, Any]:
    """Export at the end of a run: by rank 0 alone, and by all ranks. Eight files are written."""
    torch.set_num_threads(THREADS)
    mesh = sharding_mesh(port=port)
    digests: dict[str, str] = {}

    def prepare() -> HuggingFaceExport:
        return _new_export(Path(source), target, num_mb * 10**6 // 8)

    def by_one() -> None:
        if mesh.is_leader:
            prepare().run(num_workers=1, written=_ignore_progress)

    def by_all() -> None:
        export_on_all_ranks(prepare)

    target = Path(folder) / "exported"

    def measured(name: str, call: Callable[[], None]) -> float:
        seconds = wall_s(call, mesh.barrier)
        if mesh.is_leader:
            digests[name] = _digest(target)
            shutil.rmtree(target)
        mesh.barrier()
        return seconds

    variants = {"one": by_one, "all": by_all}
    calls = {name: partial(measured, name, call) for name, call in variants.items()}
    seconds = alternate(calls, rounds, shuffled=True)
    return {**seconds, "digests": digests, "threads": torch.get_num_threads()}


def _digest(folder: Path) -> str:
    """A checksum of the names and bytes of all files."""
    digest = xxhash.xxh3_64()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def bit_sum(tensor: torch.Tensor) -> int:
    """The sum of the bits of a bfloat16 tensor, as integers."""
    return int(tensor.view(torch.int16).sum(dtype=torch.int64))


def measure_conversion(variant: str, source: str, target: str) -> dict[str, Any]:
    """Convert once, and return seconds, memory and bytes."""
    # Each of our workers is a thread, and no operation has threads of its own.
    torch.set_num_threads(THREADS)
    # Resets the peak resident set size.
    Path("/proc/self/clear_refs").write_text("5")
    memory, counters = status_bytes("VmRSS"), ("rchar", "wchar")
    before = [io_bytes(key) for key in counters]
    began_s = time.perf_counter()
    CONVERSIONS[variant](Path(source), Path(target))
    seconds = time.perf_counter() - began_s
    read, written = (io_bytes(key) - old for key, old in zip(counters, before, strict=True))
    measured = {
        "s": seconds,
        "memory": status_bytes("VmHWM") - memory,
        "read": read,
        "written": written,
        "threads": torch.get_num_threads(),
        "checksum": _checksum(Path(target)),
    }
    if variant not in ("ours in", "DCP in"):
        shutil.rmtree(target)
    return measured
