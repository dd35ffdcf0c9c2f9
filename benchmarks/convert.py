"""Conversions of a Hugging Face folder, and loads of it on ranks, beside the least that has to be
done and beside torch DCP.

python -m benchmarks.convert [--quick] [--json PATH]

The floor of a conversion loads and saves the same files by the safetensors library, one after the
other, and leaves it to the system when they reach the disk; ours waits for that, and is also set
against a floor that does. The peer is torch DCP's reader and writer of such folders, on which
torchtitan's conversion is built; names are not changed, so that it does less. Each turn is a
process, and its imports are not counted. A load is set against ranks that each load all files.

Exits with 1 when a process fails or sides moved other bytes; a missed goal is a row that says so.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.agreement import Agreement
from benchmarks.convert_model import spec_of_size
from benchmarks.processes import run
from benchmarks.report import main
from benchmarks.rows import Row, compare, demand, tell
from torchtitan_lite.checkpoint.conversion import expected_shapes

_MOST_TIME = 1.5
_MOST_READ = 1.05
_WORKERS = 2
_LARGEST = 2
"""Of the largest tensors, that a worker may hold."""
_FIRST_PORT = 29780


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    num_mb: int
    num_shards: int
    rounds: int
    world_sizes: tuple[int, ...]


FULL = Plan(num_mb=1000, num_shards=4, rounds=5, world_sizes=(1, 2, 4))
QUICK = Plan(num_mb=60, num_shards=2, rounds=1, world_sizes=(2,))


def measure(plan: Plan, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """All of it, one after the other."""
    source = folder / "hf"
    arguments = ["--folder", source, "--mb", plan.num_mb, "--shards", plan.num_shards]
    program = ("-m", "benchmarks.convert_model")
    run(program, list(map(str, arguments)), 1, folder / "model.txt")
    yield from _conversions(plan, source, folder)
    for number, world_size in enumerate(plan.world_sizes):
        yield from _loads(plan, source, world_size, folder / f"load_{world_size}", number)


def _conversions(plan: Plan, source: Path, folder: Path) -> Iterator[tuple[Row, Agreement]]:
    ways = {
        "floor": (source, "floor"),
        "durable floor": (source, "durable_floor"),
        "ours in": (source, "ours_in"),
        "DCP in": (source, "dcp_in"),
        "ours out": (folder / "ours_in", "ours_out"),
        "DCP out": (folder / "dcp_in", "dcp_out"),
    }
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in ways}
    for number in range(plan.rounds):
        for side, (given, name) in ways.items():
            result = folder / "result.json"
            # The last round's are the next way's source.
            target = folder / name if number == 0 else folder / f"{name}_{number}"
            paths = ["--source", given, "--target", target, "--json", result]
            arguments = [side, *map(str, paths)]
            run(("-m", "benchmarks.convert_side"), arguments, 1, folder / "side.txt")
            found[side].append(json.loads(result.read_text()))
            if number:
                _remove(target)
    shapes = expected_shapes(spec_of_size(plan.num_mb))[0].values()
    total, largest = (2 * found_ for found_ in (sum(map(prod, shapes)), max(map(prod, shapes))))
    for way in ("in", "out"):
        ours, peer, floor = (found[side] for side in (f"ours {way}", f"DCP {way}", "floor"))
        case = f"{total / 1e6:.0f} MB {way}"
        agreement = Agreement(case)
        for key in ("checksum", "threads"):
            agreement.same(key, ours[0][key], floor[0][key])
            agreement.same(key, peer[0][key], floor[0][key])
        common: dict[str, Any] = {"case": case, "comparable": agreement.holds}

        def middle(side: list[dict[str, Any]], key: str) -> float:
            return median(one[key] for one in side)

        yield (
            compare(
                **common,
                metric="time",
                unit="s",
                ours=middle(ours, "s"),
                floor=middle(floor, "s"),
                goal=_MOST_TIME,
            ),
            agreement,
        )
        yield (
            compare(
                **common,
                metric="time, against a floor that waits for the disk too",
                unit="s",
                ours=middle(ours, "s"),
                floor=middle(found["durable floor"], "s"),
                goal=_MOST_TIME,
            ),
            agreement,
        )
        yield (
            compare(
                **common,
                metric="time, against torch DCP",
                unit="s",
                ours=middle(ours, "s"),
                peer=middle(peer, "s"),
                goal=1.0,
            ),
            agreement,
        )
        yield (
            demand(
                **common,
                metric="peak memory above the base, of the largest tensor a worker",
                unit="tensors",
                ours=middle(ours, "memory") / largest / _WORKERS,
                peer=middle(peer, "memory") / largest / _WORKERS,
                goal=_LARGEST,
            ),
            agreement,
        )
        yield (
            demand(
                **common,
                metric="bytes read, of the weights",
                unit="-",
                ours=middle(ours, "read") / total,
                goal=_MOST_READ,
            ),
            agreement,
        )
        yield (
            tell(
                **common,
                metric="bytes written, of the weights",
                unit="-",
                ours=middle(ours, "written") / total,
                peer=middle(peer, "written") / total,
            ),
            agreement,
        )


def _loads(
    plan: Plan, source: Path, world_size: int, folder: Path, number: int
) -> Iterator[tuple[Row, Agreement]]:
    folder.mkdir()
    paths = ["--source", source, "--folder", folder, "--rounds", plan.rounds]
    arguments = [*map(str, paths), "--port", str(_FIRST_PORT + number)]
    run(("-m", "benchmarks.convert_load"), arguments, world_size, folder / "log.txt")
    ranks = [json.loads((folder / f"rank_{r}.json").read_text()) for r in range(world_size)]
    total = bits = 0
    for file in source.glob("*.safetensors"):
        for tensor in load_file(file).values():
            total += tensor.nbytes
            bits += int(tensor.view(torch.int16).sum(dtype=torch.int64))
    case = f"load on {world_size} ranks, {total / 1e6:.0f} MB"
    agreement = Agreement(case)
    agreement.same("sum of bits", sum(rank["sum"] for rank in ranks), bits)
    agreement.same("threads", ranks[0]["threads"], torch.get_num_threads())
    yield (
        compare(
            case=case,
            metric="time, against each rank loading all",
            unit="s",
            ours=median(ranks[0]["ours"]),
            floor=median(ranks[0]["safetensors"]),
            goal=1.0,
            comparable=agreement.holds,
        ),
        agreement,
    )
    yield (
        demand(
            case=case,
            metric="bytes read by all ranks, of the weights",
            unit="-",
            ours=sum(rank["read"] for rank in ranks) / total,
            goal=_MOST_READ,
            comparable=agreement.holds,
        ),
        agreement,
    )


def _remove(path: Path) -> None:
    for inner in path.rglob("*"):
        if inner.is_file():
            inner.unlink()


if __name__ == "__main__":
    main("Conversions and loads of Hugging Face folders.", measure, full=FULL, quick=QUICK)
