"""Build the pipeline schedule: what runs forward and backward over the microbatches of a step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from torchtitan_lite.config import Config
from torchtitan_lite.config.tables.training import CROSS_ENTROPY
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import MicrobatchLoss, PipelineSchedule
from torchtitan_lite.parallel import build_pipeline_schedule
from torchtitan_lite.parallel.precision import precision_policy
from torchtitan_lite.training.builders.run_context import RunContext
from torchtitan_lite.training.debug import (
    ScheduleInside,
    StepTracer,
    explicit_redistribution,
    traced_step,
)
from torchtitan_lite.training.train_state import TrainState

StepContext = Callable[[int], AbstractContextManager[object]]


def build_schedule(
    run: RunContext, parts: Sequence[nn.Module], state: TrainState
) -> tuple[PipelineSchedule, StepContext]:
    """Build the schedule of this rank's `parts` of the model, and the context of each step."""
    config, mesh = run.config, run.mesh
    loss_backend = config.compile.backend if config.compile.covers("loss") else None
    schedule = build_pipeline_schedule(
        parts,
        run.spec,
        cross_entropy(
            logits_per_chunk=mesh.device.logits_per_chunk,
            compile_backend=loss_backend,
            z_loss_weight=config.training.z_loss_weight,
        ),
        mesh,
        config.parallelism,
        hidden_dtype=precision_policy(config.training, mesh.device).compute,
        is_compiled=config.compile.covers("model"),
        training_loss=_registered_loss(config),
    )
    if config.debug.explicit_redistribution:
        schedule = ScheduleInside(schedule, explicit_redistribution(parts))
    if not config.debug.trace_communication:
        return schedule, nullcontext
    tracer = StepTracer(
        parts,
        mesh,
        traced_step=traced_step(
            config.debug.trace_communication_step,
            resume_step=state.step,
            last_step=config.training.steps,
        ),
        folder=run.folder,
        tensors=state.tensors,
        faults=run.faults,
    )
    return ScheduleInside(schedule, tracer.in_schedule), tracer.step


def _registered_loss(config: Config) -> MicrobatchLoss | None:
    """Create the loss that `training.loss` names; None for cross entropy."""
    if config.training.loss == CROSS_ENTROPY:
        return None
    return REGISTRY.losses[config.training.loss](config)
