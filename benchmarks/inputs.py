"""What the hand-written side is given: the trainer's own samples, weights and numbers.

As a command it writes them to a file for `bare_start`, and warms the data cache on the way.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.hand_written_step import Batch, Recipe
from torchtitan_lite.builders import Built, build
from torchtitan_lite.config import Config, parse_command_line
from torchtitan_lite.data import DataLoader, share_of_step
from torchtitan_lite.device import detect_device
from torchtitan_lite.log import configure_logging
from torchtitan_lite.mesh import start_mesh
from torchtitan_lite.preemption import StopRequest


def recipe_of(config: Config) -> Recipe:
    """The numbers of the hand-written step. Raises ValueError when it cannot do what `config`
    says."""
    optimizer = config.optimizer
    if (optimizer.name, optimizer.implementation) != ("AdamW", "fused"):
        raise ValueError(
            "The hand-written step has fused AdamW, but the configuration "
            f"{optimizer.implementation} {optimizer.name}."
        )
    return Recipe(
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_norm=config.training.max_norm,
    )


def batches_of(
    loader: DataLoader, local_batch_size: int, rank: int, num_ranks: int, num_steps: int
) -> list[Batch]:
    """The samples of `rank` in each of the first steps, one microbatch a step."""
    global_batch_size = local_batch_size * num_ranks
    batches = []
    for step in range(num_steps):
        cursor = step * global_batch_size
        share = share_of_step(
            range(cursor, cursor + global_batch_size), local_batch_size, rank, num_ranks
        )
        (microbatch,) = loader.take(share, step + 1)
        batches.append(
            Batch(**{field.name: getattr(microbatch, field.name) for field in fields(Batch)})
        )
    return batches


@contextmanager
def opened(trainer_arguments: Sequence[str]) -> Iterator[tuple[Config, Built]]:
    """What the trainer would train; its data cache is warm afterwards."""
    configure_logging()
    config, _ = parse_command_line(trainer_arguments)
    with (
        start_mesh(config.parallelism, config.comm, detect_device(config.job.device)) as mesh,
        build(config, mesh, StopRequest()) as built,
    ):
        yield config, built


def write_inputs(path: Path, config: Config, built: Built, batches: Any) -> None:
    """Write sizes, numbers, weights and `batches` (plain lists, dicts and tensors) to a file."""
    inputs = {
        "dims": asdict(built.spec.dims),
        "recipe": asdict(recipe_of(config)),
        "lr": built.job.state.lr_scheduler.lr(0),
        "weights": built.job.state.model.state_dict(),
        "batches": batches,
    }
    torch.save(inputs, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write weights, numbers and the first step's samples of each rank to a file."""
    parser = argparse.ArgumentParser(description="Write the inputs of bare_start.")
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    given, trainer_arguments = parser.parse_known_args(arguments)
    with opened(trainer_arguments) as (config, built):
        loader, local_batch_size = built.job.state.loader, built.job.local_batch_size
        batches = [
            vars(batches_of(loader, local_batch_size, rank, given.ranks, num_steps=1)[0])
            for rank in range(given.ranks)
        ]
        write_inputs(given.path, config, built, batches)


if __name__ == "__main__":
    main()
