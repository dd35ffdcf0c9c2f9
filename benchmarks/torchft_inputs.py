"""What the trainer on torchft is given: the product's own samples, weights and numbers, in a file.

python -m benchmarks.torchft_inputs --path PATH --steps N TRAINER_ARGUMENTS
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.inputs import batches_of, opened, write_inputs


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write the inputs of torchft_trainer.")
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    given, trainer_arguments = parser.parse_known_args(arguments)
    with opened(trainer_arguments) as (config, built):
        loader, local_batch_size = built.job.state.loader, built.job.local_batch_size
        num_replicas = built.job.global_batch_size // local_batch_size
        batches = [
            batches_of(loader, local_batch_size, replica, num_replicas, given.steps)
            for replica in range(num_replicas)
        ]
        plain = [[vars(batch) for batch in of_one] for of_one in batches]
        write_inputs(given.path, config, built, plain)


if __name__ == "__main__":
    main()
