"""One rank of a calibration: what is fitted here predicts exchanges that were not fitted to.

Started by `benchmarks.redistribute`, by torchrun.
"""

import argparse
import gc
import json
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.leaving import leave
from torchtitan_lite.redistribute.calibration import (
    SHAPES,
    calibrate,
    fraction_misordered,
    fraction_within,
    held_out_steps,
    predicted_s,
    time_steps,
)
from torchtitan_lite.redistribute.cost import ExchangeOptions


def main() -> None:
    """Calibrate, predict, and write the shares of errors to PATH."""
    parser = argparse.ArgumentParser(description="Judge the cost model of redistribution.")
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--held-out", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    gc.disable()
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    _, costs = calibrate(given.turns, device, SHAPES[1::2] if given.small else SHAPES)
    steps = held_out_steps(dist.get_world_size(), given.held_out)
    samples = time_steps(steps, given.turns, device, ExchangeOptions())
    if dist.get_rank() == 0:
        shares = {
            "costs": str(costs),
            "beyond": 1 - fraction_within(samples, costs),
            "misordered": fraction_misordered(samples, costs),
            "samples": [
                f"{sample.seconds * 1e3:.3g} ms, predicted "
                f"{predicted_s(sample.step, costs) * 1e3:.3g}: {sample.name}"
                for sample in samples
            ],
        }
        given.path.write_text(json.dumps(shares), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
