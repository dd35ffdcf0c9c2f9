"""Ways to load what the sides have saved, warm and cold, on one rank."""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from benchmarks.anonymous import AnonymousPeak
from benchmarks.checkpoint_side import STEPS, Side
from benchmarks.checkpoint_state import BenchState
from benchmarks.disk import read_bytes
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.schema.checkpoint import CheckpointConfig


@dataclass(frozen=True)
class Loads:
    """What was measured on this rank."""

    turns: Mapping[str, Sequence[Mapping[str, float]]]
    """By way and heat: seconds, and bytes read from storage."""
    faults: Sequence[str]
    """Ways that do not load what was saved."""
    peak_bytes: int
    """That a restore of ours holds beyond the state."""


def measure_loads(made: Mapping[str, Side], state: BenchState, mesh: Mesh, *, rounds: int) -> Loads:
    """Every rank must call it."""
    ours, plain, dcp = (made[name] for name in ("ours", "safetensors", "DCP synchronous"))
    for side in (ours, plain, dcp):
        _save(side, state, mesh)
    parts = {
        name: tensor.to_local()
        for name, tensor in state.tensors().items()
        if isinstance(tensor, DTensor)
    }
    file = plain.folder / f"safetensors-{mesh.rank}"
    # Touched before, as the live state is, into which the others read.
    kept = bytearray(file.stat().st_size)
    sides: dict[str, tuple[Path, Callable[[], Any]]] = {
        "ours": (ours.folder, lambda: _ours(ours.folder, state, mesh)),
        "safetensors": (plain.folder, lambda: _safetensors(file, parts)),
        "DCP": (dcp.folder, lambda: _dcp(dcp.folder, state)),
    }
    faults = _wrong(sides, parts)
    with AnonymousPeak() as peak:
        _ours(ours.folder, state, mesh)
    sides["readinto"] = (plain.folder, lambda: _readinto(file, kept))
    found: dict[str, list[dict[str, float]]] = {}
    for heat in ("warm", "cold"):
        for number in range(rounds + 1):
            names = list(sides)
            random.Random(number).shuffle(names)
            for name in names:
                folder, way = sides[name]
                if heat == "cold":
                    _forget(folder)
                mesh.barrier()
                before, started = read_bytes(), time.perf_counter()
                way()
                mesh.barrier()
                taken = time.perf_counter() - started
                # The first round is the warm-up.
                if number:
                    read = float(read_bytes() - before)
                    found.setdefault(f"{name}, {heat}", []).append({"s": taken, "read": read})
    return Loads(found, faults, peak.bytes)


def _save(side: Side, state: BenchState, mesh: Mesh) -> None:
    """The present state, as the side does it."""
    state.step = (state.step // STEPS + 1) * STEPS
    side.agreed(mesh.sum(side.ready()))
    side.after_step(saves=True)
    side.settle()


def _wrong(
    sides: Mapping[str, tuple[Path, Callable[[], Any]]], parts: Mapping[str, torch.Tensor]
) -> list[str]:
    """The ways that do not give the parts back as they were saved, bit by bit."""
    saved, wrong = {name: part.clone() for name, part in parts.items()}, []
    for side, (_, way) in sides.items():
        for part in parts.values():
            part.zero_()
        way()
        if not all(torch.equal(part, saved[name]) for name, part in parts.items()):
            wrong.append(side)
    return wrong


def _ours(folder: Path, state: BenchState, mesh: Mesh) -> None:
    config = CheckpointConfig(enable=True, load_only=True)
    manager = CheckpointManager(config, dump_folder=folder, state=state, mesh=mesh, run_config={})
    assert manager.restore() is not None
    manager.close()


def _safetensors(file: Path, parts: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in load_file(file).items():
        parts[name].copy_(tensor)


def _readinto(file: Path, buffer: bytearray) -> None:
    room = memoryview(buffer)
    with file.open("rb", buffering=0) as opened:
        # A call reads 2 GiB at most.
        while room and (length := opened.readinto(room)):
            room = room[length:]


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
