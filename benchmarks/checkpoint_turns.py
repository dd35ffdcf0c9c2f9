"""One rank of the comparison of ways to save: cycles of steps, with one save in each.

A step computes for a set number of matrix products, exchanges numbers, and changes the state. All
sides save the same state on the same ranks; in which order they come is drawn anew in each round. A
cycle is timed from a barrier to a barrier, until what it has saved is durable.

Started by `benchmarks.checkpoint`, by torchrun.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.anonymous import AnonymousPeak
from benchmarks.checkpoint_loads import measure_loads
from benchmarks.checkpoint_side import STEPS, Side
from benchmarks.checkpoint_sides import SIDES
from benchmarks.checkpoint_state import BenchState, sharded_state, sharding_mesh
from benchmarks.checkpoint_torchtitan import sides_of
from torchtitan_lite.leaving import leave
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.metrics.garbage import ScheduledGarbageCollection


def main() -> None:
    """Take the turns, then write what was measured to FOLDER/rank_N.json."""
    parser = argparse.ArgumentParser(description="Take turns of ways to save a state.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--group", choices=list(SIDES), required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    given = parser.parse_args()
    mesh = sharding_mesh(port=29511)
    state = sharded_state(mesh, given.layers)
    products = _products(mesh, given.step_seconds)
    sides = sides_of(given.group)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    # As the trainer has it: no side waits for a collection that another one has brought about.
    garbage = ScheduledGarbageCollection(freq=STEPS)
    made = {}
    for name, make in sides.items():
        folder = given.folder / name.replace(" ", "_").replace(",", "")
        folder.mkdir(parents=True, exist_ok=True)
        made[name] = make(state, mesh, folder)
    for number in range(given.rounds + 1):
        names = list(made)
        random.Random(number).shuffle(names)
        for name in names:
            turn = _cycle(made[name], state, mesh, products)
            garbage.step(STEPS)
            # The first round is the warm-up.
            if number:
                turns[name].append(turn)
    told: dict[str, Any] = {"turns": turns}
    if given.group == "saves":
        memory = {}
        for name in ("none", "ours"):
            with AnonymousPeak() as peak:
                _cycle(made[name], state, mesh, products)
            memory[name] = peak.bytes
        loads = measure_loads(made, state, mesh, rounds=given.rounds)
        memory["restore"] = loads.peak_bytes
        told |= {"loads": loads.turns, "faults": loads.faults, "memory": memory}
        parts = (p.to_local() for p in state.tensors().values() if isinstance(p, DTensor))
        told["bytes"] = sum(part.nbytes for part in parts)
    for side in made.values():
        side.close()
    (given.folder / f"rank_{mesh.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


class Stopwatch:
    """Adds up the seconds of its `with` blocks."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.seconds += time.perf_counter() - self._began


def _products(mesh: Mesh, step_seconds: float) -> int:
    """How many matrix products take so long on all ranks at once; the same for all."""
    matrix = torch.randn(512, 512)
    times = []
    for _ in range(5):
        mesh.barrier()
        started = time.perf_counter()
        for _ in range(10):
            torch.mm(matrix, matrix)
        times.append((time.perf_counter() - started) / 10)
    slowest = mesh.sum_of([sorted(times)[2]])[0] / mesh.world_size
    return max(1, round(step_seconds / slowest))


def _cycle(side: Side, state: BenchState, mesh: Mesh, products: int) -> dict[str, float]:
    """Wall and blocked seconds of a cycle whose first step saves, and the CPU seconds of all that
    saves until it is durable."""
    matrix, me = torch.randn(512, 512), psutil.Process()
    weights = [t.to_local() for t in state.tensors().values() if isinstance(t, DTensor)][:10]
    state.step = (state.step // STEPS + 1) * STEPS - 1
    blocked, saved_at = Stopwatch(), 0.0
    mesh.barrier()
    cpu_before = _cpu_seconds(me)
    began = time.perf_counter()
    for step in range(STEPS):
        for _ in range(products):
            torch.mm(matrix, matrix)
        # To wait for a slower rank is not to be blocked by saving: what it costs is in the wall
        # time.
        mesh.barrier()
        with blocked:
            numbers = side.ready()
        sums = mesh.sum(numbers)
        with blocked:
            side.agreed(sums)
        for weight in weights:
            weight.mul_(1.0001)
        state.step += 1
        if step == 0:
            saved_at = time.perf_counter()
        with blocked:
            side.after_step(saves=step == 0)
    side.settle()
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
    """Of this process and all that it started."""
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
    leave(0)
