"""Ways to load what the sides have saved, warm and cold, on one rank."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint_sides import Ours, Side
from benchmarks.checkpoint_state import BenchState
from torchtitan_lite.checkpoint.config import CheckpointConfig
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.mesh import Mesh


def measure_loads(
    made: Mapping[str, Side], state: BenchState, mesh: Mesh, *, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Seconds, and bytes read from storage by this rank, of each way. Every rank must call it."""
    ours, plain = made["ours"], made["safetensors"]
    assert isinstance(ours, Ours)
    locals_ = {
        name: tensor.to_local()
        for name, tensor in state.tensors().items()
        if isinstance(tensor, DTensor)
    }
    file = plain.folder / f"safetensors-{mesh.rank}"
    sides: dict[str, tuple[Path, Callable[[], Any]]] = {
        "ours": (ours.folder, lambda: _ours(ours.folder, state, mesh)),
        "safetensors": (plain.folder, lambda: _safetensors(file, locals_)),
        "readinto": (plain.folder, lambda: _readinto(file)),
        "DCP": (
            made["DCP synchronous"].folder,
            lambda: _dcp(made["DCP synchronous"].folder, state),
        ),
    }
    found: dict[str, list[dict[str, float]]] = {}
    for heat in ("warm", "cold"):
        for name, (folder, way) in sides.items():
            found[f"{name}, {heat}"] = []
            for number in range(rounds + 1):
                if heat == "cold":
                    _forget(folder)
                mesh.barrier()
                before, started = read_bytes(), time.perf_counter()
                way()
                mesh.barrier()
                taken = time.perf_counter() - started
                if number:
                    read = float(read_bytes() - before)
                    found[f"{name}, {heat}"].append({"s": taken, "read": read})
    return found


def _ours(folder: Path, state: BenchState, mesh: Mesh) -> None:
    config = CheckpointConfig(enable=True, load_only=True)
    manager = CheckpointManager(config, dump_folder=folder, state=state, mesh=mesh, run_config={})
    assert manager.restore() is not None
    manager.close()


def _safetensors(file: Path, parts: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in load_file(file).items():
        parts[name].copy_(tensor)


def _readinto(file: Path) -> None:
    buffer = bytearray(file.stat().st_size)
    with file.open("rb", buffering=0) as opened:
        opened.readinto(buffer)


def _dcp(folder: Path, state: BenchState) -> None:
    newest = max(folder.glob("dcp-*"), key=lambda path: path.stat().st_mtime)
    load(dict(state.tensors()), checkpoint_id=newest)


def _forget(folder: Path) -> None:
    """Let the system forget the files, which are durable."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_bytes() -> int:
    """That this process has had read from disks."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0
