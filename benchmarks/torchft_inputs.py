"""What the trainer on torchft is given: the product's own samples, weights and numbers, in a file.

python -m benchmarks.torchft_inputs --path PATH --steps N TRAINER_ARGUMENTS
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.inputs import batches_of, recipe_of
from torchtitan_lite.build import build
from torchtitan_lite.config import parse_command_line
from torchtitan_lite.device import detect_device
from torchtitan_lite.log import configure_logging
from torchtitan_lite.mesh import start_mesh
from torchtitan_lite.preemption import StopRequest


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file; the data cache is warm afterwards."""
    parser = argparse.ArgumentParser(description="Write the inputs of torchft_trainer.")
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    given, trainer_arguments = parser.parse_known_args(arguments)
    configure_logging()
    config, _ = parse_command_line(trainer_arguments)
    with (
        start_mesh(config.parallelism, config.comm, detect_device(config.job.device)) as mesh,
        build(config, mesh, StopRequest()) as built,
    ):
        state, local_batch_size = built.job.state, built.job.local_batch_size
        num_replicas = built.job.global_batch_size // local_batch_size
        batches = [
            batches_of(state.loader, local_batch_size, replica, num_replicas, given.steps)
            for replica in range(num_replicas)
        ]
        inputs = {
            "dims": asdict(built.spec.dims),
            "recipe": asdict(recipe_of(config)),
            "lr": state.schedule.lr(0),
            "weights": state.model.state_dict(),
            "batches": [[vars(batch) for batch in of_one] for of_one in batches],
        }
        torch.save(inputs, given.path)


if __name__ == "__main__":
    main()
