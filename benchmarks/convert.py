"""Conversions of a Hugging Face folder, and loads of it on ranks, against a floor and torch DCP.

python -m benchmarks.convert [--quick] [--json PATH]

The floor of a conversion loads and saves the same files by the safetensors library, one after the
other, and does not wait for the disk; ours does, and is also compared with a floor that does. The
peer is torch DCP's reader and writer of such folders, on which torchtitan's conversion is built;
it renames no tensors, so it does less. Each turn is a process, and its imports are not counted. A
load is compared with ranks that each load all files, and an export at the end of a run with one
that rank 0 writes alone.

The exit status is 1 if a process fails or variants moved other bytes; a missed goal is only
reported in its row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.convert_variants import (
    WORKERS,
    bit_sum,
    measure_conversion,
    measure_loads,
    measure_shared_export,
    spec_of_size,
    write_model,
)
from benchmarks.harness import Comparison, Result, formatted, main
from benchmarks.processes import run_ranks
from torchtitan_lite.checkpoint.convert.conversion import expected_shapes

_MAX_TIME = 1.5
_MAX_READ = 1.05
_MAX_MEMORY = 2
"""Per worker, in largest tensors."""
_MAX_SHARED_TIME = 0.8
"""Maximum time of an export by several ranks, which share two cores and a disk."""
_FIRST_PORT = 29780


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run."""

    num_mb: int
    num_shards: int
    rounds: int
    world_sizes: tuple[int, ...]
    """World sizes of loads; those of several ranks also export."""


FULL = Plan(num_mb=1000, num_shards=4, rounds=5, world_sizes=(1, 2, 4))
QUICK = Plan(num_mb=60, num_shards=2, rounds=1, world_sizes=(2,))


def measure(plan: Plan, folder: Path) -> Iterator[Result]:
    """Measure conversions, then loads and exports of several ranks."""
    source = folder / "hf"
    arguments = {"folder": str(source), "num_mb": plan.num_mb, "num_shards": plan.num_shards}
    run_ranks(write_model, arguments, 1, folder / "write_model")
    yield from _conversions(plan, source, folder)
    for index, world_size in enumerate(plan.world_sizes):
        own = folder / f"load_{world_size}"
        yield from _loads(plan, source, world_size, own, _FIRST_PORT + index)
        if world_size > 1:
            own = folder / f"export_{world_size}"
            yield _shared_export(plan, folder / "ours_in", world_size, own, _FIRST_PORT + index)


def _conversions(plan: Plan, source: Path, folder: Path) -> Iterator[Result]:
    sources = {
        "floor": source,
        "durable floor": source,
        "ours in": source,
        "DCP in": source,
        "ours out": folder / "ours_in",
        "DCP out": folder / "DCP_in",
    }
    measured: dict[str, list[dict[str, Any]]] = {variant: [] for variant in sources}
    for index in range(plan.rounds):
        for variant, folder_of in sources.items():
            name = variant.replace(" ", "_")
            # The imports of the first round are the sources of the exports.
            target = folder / name if index == 0 else folder / f"{name}_{index}"
            arguments = {"variant": variant, "source": str(folder_of), "target": str(target)}
            measured[variant] += run_ranks(measure_conversion, arguments, 1, folder / "conversion")
            if index:
                _remove_files(target)
    sizes = [prod(shape) for shape in expected_shapes(spec_of_size(plan.num_mb))[0].values()]
    total, largest = (2 * size for size in (sum(sizes), max(sizes)))
    for way in ("in", "out"):
        ours, peer, floor = (
            measured[variant] for variant in (f"ours {way}", f"DCP {way}", "floor")
        )
        comparison = Comparison(f"{total / 1e6:.0f} MB {way}")
        for key in ("checksum", "threads"):
            comparison.same(key, ours[0][key], floor[0][key])
            comparison.same(key, peer[0][key], floor[0][key])
        ours_s, peer_s = _median(ours, "s"), _median(peer, "s")
        durable_s = _median(measured["durable floor"], "s")
        yield comparison.ratio("time", "s", ours_s, floor=_median(floor, "s"), goal=_MAX_TIME)
        metric = "time, against a floor that waits for the disk too"
        yield comparison.ratio(metric, "s", ours_s, floor=durable_s, goal=_MAX_TIME)
        yield comparison.ratio("time, against torch DCP", "s", ours_s, peer=peer_s, goal=1.0)
        yield comparison.value(
            "peak memory above the base, of the largest tensor a worker",
            "tensors",
            _median(ours, "memory") / largest / WORKERS,
            peer=_median(peer, "memory") / largest / WORKERS,
            goal=_MAX_MEMORY,
        )
        read = _median(ours, "read") / total
        yield comparison.value("bytes read, of the weights", "-", read, goal=_MAX_READ)
        written, by_peer = (_median(some, "written") / total for some in (ours, peer))
        yield comparison.value("bytes written, of the weights", "-", written, peer=by_peer)


def _median(turns: list[dict[str, Any]], key: str) -> float:
    return median(turn[key] for turn in turns)


def _loads(plan: Plan, source: Path, world_size: int, folder: Path, port: int) -> Iterator[Result]:
    arguments = {"source": str(source), "rounds": plan.rounds, "port": port}
    ranks = run_ranks(measure_loads, arguments, world_size, folder)
    total = bits = 0
    for file in source.glob("*.safetensors"):
        for tensor in load_file(file).values():
            total += tensor.nbytes
            bits += bit_sum(tensor)
    comparison = Comparison(f"load on {world_size} ranks, {total / 1e6:.0f} MB")
    comparison.same("sum of bits", sum(rank["bit_sum"] for rank in ranks), bits)
    comparison.same("threads", ranks[0]["threads"], torch.get_num_threads())
    ours_s, floor_s = (median(ranks[0][variant]) for variant in ("ours", "safetensors"))
    metric = "time, against each rank loading all"
    yield comparison.ratio(metric, "s", ours_s, floor=floor_s, goal=1.0)
    read = sum(rank["read"] for rank in ranks) / total
    metric = "bytes read by all ranks, of the weights"
    yield comparison.value(metric, "-", read, goal=_MAX_READ)


def _shared_export(plan: Plan, source: Path, world_size: int, folder: Path, port: int) -> Result:
    arguments = {"source": str(source), "folder": str(folder), "num_mb": plan.num_mb}
    ranks = run_ranks(
        measure_shared_export,
        {**arguments, "rounds": plan.rounds, "port": port},
        world_size,
        folder,
    )
    comparison = Comparison(f"export by {world_size} ranks, {plan.num_mb} MB")
    digests = ranks[0]["digests"]
    comparison.same("checksum of the files", digests["all"], digests["one"])
    comparison.same("threads", ranks[0]["threads"], torch.get_num_threads())
    ours, alone = ranks[0]["all"], ranks[0]["one"]
    pairs = zip(ours, alone, strict=True)
    comparison.note(f"ratio of each round: {formatted(some / alone_s for some, alone_s in pairs)}")
    metric = "time, against rank 0 alone"
    return comparison.ratio(metric, "s", median(ours), floor=median(alone), goal=_MAX_SHARED_TIME)


def _remove_files(path: Path) -> None:
    for inner in path.rglob("*"):
        if inner.is_file():
            inner.unlink()


if __name__ == "__main__":
    main("Conversions and loads of Hugging Face folders.", measure, full=FULL, quick=QUICK)
