"""The hand-written loop beside a trainer: its samples, initial weights and learning rates.

Its parallelism is that of the trainer's mesh, by torch's plain functions: `fully_shard`,
`parallelize_module` or `PipelineStage`. It runs on the process groups of the trainer's mesh, since
equal meshes in one process disturb each other (DTensor caches what it worked out for one).
"""

from collections.abc import Callable
from functools import partial

from benchmarks import hand_written_step, hand_written_tensor
from benchmarks.hand_written_pipeline import PipelineStep
from benchmarks.inputs import batches_of, recipe_of
from torchtitan_lite.builders import Built
from torchtitan_lite.config import Config
from torchtitan_lite.mesh import AXES
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.parallel.pipeline_stages import keep_only, plan_stages
from torchtitan_lite.spec import blocks_of


class HandWrittenLoop:
    """The loop of one rank. Raises ValueError for a mesh that nobody wrote a loop for."""

    def __init__(self, config: Config, built: Built, num_steps: int) -> None:
        job, mesh = built.job, built.job.mesh
        degrees = mesh.degrees
        axis = _only_axis(degrees.shape)
        recipe = recipe_of(config)
        self._max_norm = recipe.max_norm
        self._lrs = [job.state.lr_scheduler.lr(step) for step in range(num_steps)]
        samples = job.global_batch_size // degrees.batch
        # Read before the clock starts.
        self._batches = batches_of(
            job.state.loader, samples, mesh.batch_rank, degrees.batch, num_steps
        )
        self.model = built.spec.build()
        # Before the first weights are drawn: each rank draws those that it holds.
        if axis == "tp":
            assert isinstance(self.model, Decoder)
            hand_written_tensor.cut(self.model, mesh.device_mesh["tp"])
        elif axis == "pp":
            modules = plan_stages(built.spec, config.parallelism).modules
            stage = mesh.device_mesh.get_local_rank("pp")
            keep_only(self.model, built.spec, modules[stage])
        initialize(self.model, built.spec.init, config.debug.seed or 0)
        if axis == "dp_shard":
            hand_written_step.shard(self.model, blocks_of(self.model, built.spec))
        optimizer = hand_written_step.adamw(self.model, recipe)
        self._take_step: Callable[..., float]
        if axis == "tp":
            self._take_step = partial(hand_written_tensor.step, self.model, optimizer)
        elif axis == "pp":
            group = mesh.device_mesh.get_group("pp")
            pipeline = PipelineStep(self.model, group, samples // job.local_batch_size)
            self._take_step = partial(pipeline.step, optimizer)
        else:
            world_size = mesh.world_size
            self._take_step = partial(
                hand_written_step.step, self.model, optimizer, world_size=world_size
            )

    def step(self, number: int) -> float:
        """Take step `number`, from 0. Returns its loss."""
        return self._take_step(self._batches[number], lr=self._lrs[number], max_norm=self._max_norm)


def _only_axis(shape: tuple[int, ...]) -> str | None:
    """The axis with more than one rank; None when there is none."""
    axes = [axis for axis, degree in zip(AXES, shape, strict=True) if degree > 1]
    if len(axes) > 1 or axes in (["dp_replicate"], ["cp"]):
        raise ValueError(f"There is no hand-written step for a mesh of {' x '.join(axes)}.")
    return axes[0] if axes else None
