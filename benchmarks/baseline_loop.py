"""The baseline loop on the trainer's own samples, initial weights and learning rates.

Its parallelism is that of the trainer's mesh, by torch's plain functions: `fully_shard`,
`parallelize_module` or `PipelineStage`. It runs on the process groups of the trainer's mesh,
because equal meshes in one process disturb each other (DTensor caches by mesh).

Programs that must not import the trainer get samples, weights and hyperparameters in a file.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import baseline
from benchmarks.baseline import Batch, Recipe
from benchmarks.baseline_parallel import PipelineStep, apply_tensor_parallel, tensor_parallel_step
from torchtitan_lite.config import Config
from torchtitan_lite.core.log import configure_logging
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.data import DataLoader, microbatch_indices
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import AXES, start_mesh
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.spec import blocks_of
from torchtitan_lite.parallel.pipeline_stages import keep_only, plan_stages
from torchtitan_lite.training.builders import Built, build
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import parse_command_line


class BaselineLoop:
    """The loop of one rank. Raises ValueError for a mesh that no baseline supports."""

    def __init__(self, config: Config, built: Built, num_steps: int) -> None:
        job, mesh = built.job, built.job.mesh
        degrees = mesh.degrees
        axis = _only_axis(degrees.shape)
        recipe = recipe_of(config)
        self._max_norm = recipe.max_norm
        self._lrs = [job.state.lr_scheduler.lr(step) for step in range(num_steps)]
        samples = job.batch_sizes.final // degrees.batch
        # Loaded before the measurement.
        self._batches = batches_of(
            job.state.loader, samples, mesh.batch_rank, degrees.batch, num_steps
        )
        self.model = built.spec.build()
        # Before initialization: each rank draws the weights that it holds.
        if axis == "tp":
            assert isinstance(self.model, Decoder)
            apply_tensor_parallel(self.model, mesh.device_mesh["tp"])
        elif axis == "pp":
            modules = plan_stages(built.spec, config.parallelism).modules
            stage = mesh.device_mesh.get_local_rank("pp")
            keep_only(self.model, built.spec, modules[stage])
        initialize(self.model, built.spec.init, config.debug.seed or 0)
        if axis == "dp_shard":
            baseline.shard(self.model, blocks_of(self.model, built.spec))
        optimizer = baseline.adamw(self.model, recipe)
        self._take_step: Callable[..., float]
        if axis == "tp":
            self._take_step = partial(tensor_parallel_step, self.model, optimizer)
        elif axis == "pp":
            group = mesh.device_mesh.get_group("pp")
            pipeline = PipelineStep(self.model, group, samples // job.local_batch_size)
            self._take_step = partial(pipeline.step, optimizer)
        else:
            self._take_step = partial(
                baseline.step, self.model, optimizer, world_size=mesh.world_size
            )

    def step(self, number: int) -> float:
        """Take step `number`, from 0, and return its loss."""
        return self._take_step(self._batches[number], lr=self._lrs[number], max_norm=self._max_norm)


def _only_axis(shape: tuple[int, ...]) -> str | None:
    """The axis with more than one rank, if there is one."""
    axes = [axis for axis, degree in zip(AXES, shape, strict=True) if degree > 1]
    if len(axes) > 1 or axes in (["dp_replicate"], ["cp"]):
        raise ValueError(f"There is no baseline step for a mesh of {' x '.join(axes)}.")
    return axes[0] if axes else None


def recipe_of(config: Config) -> Recipe:
    """The hyperparameters of the baseline step. Raises ValueError if it does not support them."""
    optimizer = config.optimizer
    if (optimizer.name, optimizer.implementation) != ("AdamW", "fused"):
        raise ValueError(
            "The baseline step has fused AdamW, but the configuration "
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
    """The samples of `rank` in each of the first steps, one microbatch per step."""
    global_batch_size = local_batch_size * num_ranks
    batches = []
    for step in range(num_steps):
        cursor = step * global_batch_size
        share = microbatch_indices(
            range(cursor, cursor + global_batch_size), local_batch_size, rank, num_ranks
        )
        (microbatch,) = loader.load(share, step + 1)
        batches.append(
            Batch(**{field.name: getattr(microbatch, field.name) for field in fields(Batch)})
        )
    return batches


@contextmanager
def built_job(trainer_arguments: Sequence[str]) -> Iterator[tuple[Config, Built]]:
    """Build what the trainer would train; the data cache is warm afterwards."""
    configure_logging()
    config, _ = parse_command_line(trainer_arguments)
    check_against(config, int(os.environ.get("WORLD_SIZE", "1")))
    with (
        start_mesh(config.parallelism, config.comm, detect_device(config.job.device)) as mesh,
        build(config, mesh, StopRequest()) as built,
    ):
        yield config, built


def write_first_batches(path: str, num_ranks: int, trainer_arguments: list[str]) -> None:
    """Write inputs with the first batch of each rank, for `baseline`."""
    with built_job(trainer_arguments) as (config, built):
        loader, local_batch_size = built.job.state.loader, built.job.local_batch_size
        batches = [
            vars(batches_of(loader, local_batch_size, rank, num_ranks, num_steps=1)[0])
            for rank in range(num_ranks)
        ]
        _write_inputs(Path(path), config, built, batches)


def write_replica_batches(path: str, num_steps: int, trainer_arguments: list[str]) -> None:
    """Write inputs with `num_steps` batches of each replica, for `torchft_trainer`."""
    with built_job(trainer_arguments) as (config, built):
        loader, local_batch_size = built.job.state.loader, built.job.local_batch_size
        num_replicas = built.job.batch_sizes.final // local_batch_size
        batches = [
            list(map(vars, batches_of(loader, local_batch_size, replica, num_replicas, num_steps)))
            for replica in range(num_replicas)
        ]
        _write_inputs(Path(path), config, built, batches)


def _write_inputs(path: Path, config: Config, built: Built, batches: Any) -> None:
    """Write dimensions, hyperparameters, weights and `batches` (plain lists, dicts and tensors)."""
    inputs = {
        "dims": asdict(built.spec.dims),
        "recipe": asdict(recipe_of(config)),
        "lr": built.job.state.lr_scheduler.lr(0),
        "weights": built.job.state.model.state_dict(),
        "batches": batches,
    }
    torch.save(inputs, path)
