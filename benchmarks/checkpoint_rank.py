"""One rank of the checkpoint benchmark: cycles of steps with one save, and loads.

A step computes a fixed number of matrix products, reduces values over ranks, and modifies the
state. All variants save the same state on the same ranks, in an order that is drawn anew in each
round. A cycle is timed from barrier to barrier, until its save is durable.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint_state import STEPS, BenchState, Variant, sharded_state, sharding_mesh
from benchmarks.checkpoint_variants import GROUPS
from benchmarks.worker import AnonymousPeak, alternate, io_bytes
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.config.tables.checkpoint import CheckpointConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.training.metrics.garbage import ScheduledGarbageCollection


@dataclass(frozen=True)
class Loads:
    """Measurements of loads on one rank."""

    turns: Mapping[str, Sequence[Mapping[str, float]]]
    """Seconds and bytes read from storage, by variant, warm and cold."""
    wrong_loads: Sequence[str]
    """Variants that do not load what was saved."""
    peak_bytes: int
    """Memory of a restore of ours beyond the state."""


def measure_rank(
    folder: str, group: str, layers: int, rounds: int, step_seconds: float
) -> dict[str, Any]:
    """Alternate the variants of a group, then measure memory and loads."""
    mesh = sharding_mesh(port=29511)
    state = sharded_state(mesh, layers)
    num_products = _num_products(mesh, step_seconds)
    # As in the trainer: no variant waits for a collection that another variant has caused.
    garbage = ScheduledGarbageCollection(freq=STEPS)
    variants = {}
    for name, make in GROUPS[group].items():
        own = Path(folder) / name.replace(" ", "_").replace(",", "")
        own.mkdir(parents=True, exist_ok=True)
        variants[name] = make(state, mesh, own)

    def turn(variant: Variant) -> dict[str, float]:
        measured = _cycle(variant, state, mesh, num_products)
        garbage.step(STEPS)
        return measured

    calls = {name: partial(turn, variant) for name, variant in variants.items()}
    result: dict[str, Any] = {"turns": alternate(calls, rounds, shuffled=True)}
    if group == "saves":
        memory = {}
        for name in ("none", "ours"):
            with AnonymousPeak() as peak:
                _cycle(variants[name], state, mesh, num_products)
            memory[name] = peak.bytes
        loads = measure_loads(variants, state, mesh, rounds=rounds)
        memory["restore"] = loads.peak_bytes
        result |= {"loads": loads.turns, "wrong_loads": loads.wrong_loads, "memory": memory}
        shards = (t.to_local() for t in state.tensors().values() if isinstance(t, DTensor))
        result["bytes"] = sum(shard.nbytes for shard in shards)
    for variant in variants.values():
        variant.close()
    dist.destroy_process_group()
    return result


class Stopwatch:
    """Sums the seconds of its `with` blocks."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.seconds += time.perf_counter() - self._began


def _num_products(mesh: Mesh, step_seconds: float) -> int:
    """Number of matrix products that take so long on all ranks at once; equal on all ranks."""
    matrix = torch.randn(512, 512)
    times = []
    for _ in range(5):
        mesh.barrier()
        started = time.perf_counter()
        for _ in range(10):
            torch.mm(matrix, matrix)
        times.append((time.perf_counter() - started) / 10)
    slowest = mesh.all_reduce_numbers([sorted(times)[2]])[0] / mesh.world_size
    return max(1, round(step_seconds / slowest))


def _cycle(variant: Variant, state: BenchState, mesh: Mesh, num_products: int) -> dict[str, float]:
    """Run a cycle whose first step saves; return wall and blocked seconds, seconds until the save
    is durable, and CPU seconds until then."""
    matrix, me = torch.randn(512, 512), psutil.Process()
    weights = [t.to_local() for t in state.tensors().values() if isinstance(t, DTensor)][:10]
    state.step = (state.step // STEPS + 1) * STEPS - 1
    blocked, saved_at = Stopwatch(), 0.0
    mesh.barrier()
    cpu_before = _cpu_seconds(me)
    began = time.perf_counter()
    for step in range(STEPS):
        for _ in range(num_products):
            torch.mm(matrix, matrix)
        # Waiting for a slower rank is not blocking by the save; wall time includes it.
        mesh.barrier()
        with blocked:
            values = variant.ready()
        sums = mesh.all_reduce_(values)
        with blocked:
            variant.reduced(sums)
        for weight in weights:
            weight.mul_(1.0001)
        state.step += 1
        if step == 0:
            saved_at = time.perf_counter()
        with blocked:
            variant.after_step(saves=step == 0)
    variant.settle()
    durable_s = time.perf_counter() - saved_at
    mesh.barrier()
    wall_s = time.perf_counter() - began
    cpu_s = _cpu_seconds(me) - cpu_before
    return {
        "wall_s": wall_s,
        "blocked_s": blocked.seconds,
        "durable_s": durable_s,
        "cpu_s": cpu_s,
    }


def _cpu_seconds(me: psutil.Process) -> float:
    """CPU seconds of this process and its descendants."""
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def measure_loads(
    variants: Mapping[str, Variant], state: BenchState, mesh: Mesh, *, rounds: int
) -> Loads:
    """Measure loads of what the variants have saved, warm and cold. Collective."""
    ours, plain, dcp = (variants[name] for name in ("ours", "safetensors", "DCP synchronous"))
    for variant in (ours, plain, dcp):
        _save(variant, state, mesh)
    shards = {
        name: tensor.to_local()
        for name, tensor in state.tensors().items()
        if isinstance(tensor, DTensor)
    }
    file = plain.folder / f"safetensors-{mesh.rank}"
    # Its pages exist, as those of the live state that the other variants load into.
    buffer = bytearray(file.stat().st_size)
    calls: dict[str, tuple[Path, Callable[[], Any]]] = {
        "ours": (ours.folder, lambda: _ours(ours.folder, state, mesh)),
        "safetensors": (plain.folder, lambda: _safetensors(file, shards)),
        "DCP": (dcp.folder, lambda: _dcp(dcp.folder, state)),
    }
    wrong_loads = _wrong_loads(calls, shards)
    with AnonymousPeak() as peak:
        _ours(ours.folder, state, mesh)
    calls["readinto"] = (plain.folder, lambda: _readinto(file, buffer))
    loads: dict[str, list[dict[str, float]]] = {}
    for heat in ("warm", "cold"):
        turns = {
            f"{name}, {heat}": partial(_load, call, folder, heat == "cold", mesh)
            for name, (folder, call) in calls.items()
        }
        loads |= alternate(turns, rounds, shuffled=True)
    return Loads(loads, wrong_loads, peak.bytes)


def _load(call: Callable[[], Any], folder: Path, cold: bool, mesh: Mesh) -> dict[str, float]:
    if cold:
        _drop_page_cache(folder)
    mesh.barrier()
    before, began_s = io_bytes("read_bytes"), time.perf_counter()
    call()
    mesh.barrier()
    taken_s = time.perf_counter() - began_s
    return {"s": taken_s, "read": float(io_bytes("read_bytes") - before)}


def _save(variant: Variant, state: BenchState, mesh: Mesh) -> None:
    """Save the present state and wait until it is durable."""
    state.step = (state.step // STEPS + 1) * STEPS
    variant.reduced(mesh.all_reduce_(variant.ready()))
    variant.after_step(saves=True)
    variant.settle()


def _wrong_loads(
    calls: Mapping[str, tuple[Path, Callable[[], Any]]], shards: Mapping[str, torch.Tensor]
) -> list[str]:
    """The variants that do not load the shards as they were saved, bit by bit."""
    saved, wrong = {name: shard.clone() for name, shard in shards.items()}, []
    for variant, (_, call) in calls.items():
        for shard in shards.values():
            shard.zero_()
        call()
        if not all(torch.equal(shard, saved[name]) for name, shard in shards.items()):
            wrong.append(variant)
    return wrong


def _ours(folder: Path, state: BenchState, mesh: Mesh) -> None:
    config = CheckpointConfig(enable=True, load_only=True)
    manager = CheckpointManager(config, dump_folder=folder, state=state, mesh=mesh, run_config={})
    assert manager.restore() is not None
    manager.close()


def _safetensors(file: Path, shards: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in load_file(file).items():
        shards[name].copy_(tensor)


def _readinto(file: Path, buffer: bytearray) -> None:
    remaining = memoryview(buffer)
    with file.open("rb", buffering=0) as opened:
        # A call reads at most 2 GiB.
        while remaining and (length := opened.readinto(remaining)):
            remaining = remaining[length:]


def _dcp(folder: Path, state: BenchState) -> None:
    newest = max(folder.glob("dcp-*"), key=lambda path: path.stat().st_mtime)
    load(dict(state.tensors()), checkpoint_id=newest)


def _drop_page_cache(folder: Path) -> None:
    """Drop the files, which are durable, from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
