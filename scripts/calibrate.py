"""Measure the cost of redistribution on this machine, for the planner's cost model.

torchrun --nproc-per-node N -m scripts.calibrate --out costs.json [--device cpu] [--turns 9]

Times a set of exchanges in the world that torchrun started, fits `Costs` to them,
and reports how well these predict other exchanges. Every rank must run it; rank 0 writes the file.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from scripts.calibration import (
    TimedStep,
    calibrate,
    fraction_misordered,
    fraction_within,
    held_out_steps,
    predicted_s,
    time_steps,
)
from torchtitan_lite.device import detect_device
from torchtitan_lite.errors import UserError
from torchtitan_lite.process_exit import exit_process
from torchtitan_lite.redistribute.cost import Costs, ExchangeOptions

_HELD_OUT = 40


def main(argv: list[str]) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts.calibrate", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="write the figures to this file")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
    )
    parser.add_argument("--turns", type=int, default=9, help="of which the median counts")
    options = parser.parse_args(argv)
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
            raise UserError(
                "WORLD_SIZE must be at least 2. Start the ranks with: "
                "torchrun --nproc-per-node 4 -m scripts.calibrate --out costs.json"
            )
        if not options.out.parent.is_dir():
            raise UserError(f"--out {options.out} cannot be written: its folder does not exist.")
        _calibrate(options.out, options.device, max(options.turns, 1))
    except UserError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    return 0


def _calibrate(out: Path, kind: str | None, turns: int) -> None:
    device = detect_device(kind or "auto")
    dist.init_process_group(device.backend)
    try:
        fitted, costs = calibrate(turns, device.torch_device)
        others = time_steps(
            held_out_steps(dist.get_world_size(), _HELD_OUT),
            turns,
            device.torch_device,
            ExchangeOptions(),
        )
        if dist.get_rank() == 0:
            print(
                "\n".join(
                    [*_table("Fitted to", fitted, costs), "", *_table("Held out", others, costs)]
                )
            )
            costs.save(out)
            print(f"\n{costs}\nwritten to {out}")
    finally:
        dist.destroy_process_group()


def _table(title: str, samples: Sequence[TimedStep], costs: Costs) -> list[str]:
    """Return measured and predicted times, and the fraction of predictions within a factor of
    two."""
    lines = [f"{title}:", "measured ms  predicted ms  ratio"]
    for sample in samples:
        estimate_s = predicted_s(sample.step, costs)
        ratio = estimate_s / sample.seconds
        figures = f"{sample.seconds * 1e3:11.3f}  {estimate_s * 1e3:12.3f}  {ratio:5.2f}"
        lines.append(f"{figures}  {sample.name}")
    within, wrong = fraction_within(samples, costs), fraction_misordered(samples, costs)
    lines.append(
        f"{within:.0%} of {len(samples)} predictions are within 2 times; of pairs measured to "
        f"differ by more than 1.5 times, {wrong:.1%} are predicted the other way round."
    )
    return lines


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
