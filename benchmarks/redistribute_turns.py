"""One rank of the comparison of redistribution with its floor and with DTensor.

The sides take turns in one process (`redistribute_sides`). A turn is timed from a barrier to the
end of this rank's part, and the reader takes that of the slowest rank; there is a barrier after it,
and what it has returned is dropped only then.

Started by `benchmarks.redistribute`, by torchrun.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.redistribute_sides import Side, Sides
from benchmarks.state_dicts import cases
from torchtitan_lite.leaving import leave


def main() -> None:
    """Take the turns of each case, then write what was measured to FOLDER/rank_N.json."""
    parser = argparse.ArgumentParser(description="Take turns of ways to redistribute a state.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cases", required=True, help="names, with ; between them")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args()
    gc.disable()
    dist.init_process_group("gloo")
    known = cases(dist.get_world_size(), small=given.small)
    measured: dict[str, Any] = {}
    for name in given.cases.split(";"):
        sides = Sides(known[name])
        measured[name] = {
            "seconds": seconds_of_turns(sides.sides, given.rounds),
            "right": sides.are_right(),
            "refusals": sides.refusals,
            "threads": torch.get_num_threads(),
        }
        del sides
        gc.collect()
    path = given.folder / f"rank_{dist.get_rank()}.json"
    path.write_text(json.dumps(measured), encoding="utf-8")
    dist.destroy_process_group()


def seconds_of_turns(sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of each turn on this rank, by side. Every rank must come to it."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    # The first round is the warm-up.
    for number in range(rounds + 1):
        for name, side in sides.items():
            dist.barrier()
            began_s = time.perf_counter()
            kept = side()
            taken_s = time.perf_counter() - began_s
            dist.barrier()
            del kept
            if number > 0:
                seconds[name].append(taken_s)
    return seconds


if __name__ == "__main__":
    main()
    leave(0)
