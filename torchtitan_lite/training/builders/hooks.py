"""Build the hooks of a run: what happens after each step."""

import os

from torchtitan_lite.core.output_files import flush_withheld
from torchtitan_lite.data import OpenedData
from torchtitan_lite.distributed.rpc.authentication import TOKEN
from torchtitan_lite.models import recorded_dims
from torchtitan_lite.nn.spec import PipelineSchedule
from torchtitan_lite.training.anomalies.process_checks import ProcessChecks
from torchtitan_lite.training.builders.run_context import RunContext
from torchtitan_lite.training.builders.samples import validation_samples
from torchtitan_lite.training.hooks import (
    HookContext,
    goodput_hook,
    metrics_hook,
    process_hook,
    registered_hooks,
    validation_hook,
)
from torchtitan_lite.training.metrics import GoodputTracker, Metrics
from torchtitan_lite.training.metrics.profiler import StepProfiler
from torchtitan_lite.training.text_generator import TextGenerator
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import Hook, StepReport


def build_hooks(
    run: RunContext,
    state: TrainState,
    schedule: PipelineSchedule,
    data: OpenedData,
    metrics: Metrics,
    *,
    goodput_tracker: GoodputTracker | None,
    text_generator: TextGenerator | None,
) -> list[Hook]:
    """Build the hooks in the order in which they run after each step."""
    config, mesh, total_steps = run.config, run.mesh, run.config.training.steps
    tracker, cost = goodput_tracker, run.spec.cost(config.training.seq_len)
    hooks = [
        metrics_hook(metrics, mesh, cost=cost, goodput_tracker=tracker, total_steps=total_steps)
    ]
    if tracker is not None and config.checkpoint.enable:
        hooks.append(goodput_hook(config.checkpoint.interval, tracker, metrics))
    if data.validation is not None:
        texts = validation_samples(config, data, text_generator)
        freq = config.validation.freq
        hooks.append(
            validation_hook(freq, total_steps, data.validation, schedule, metrics, mesh, texts)
        )
    if config.profiling.enable_profiling or config.profiling.enable_memory_snapshot:
        hooks.append(_profiler_hook(run, resume_step=state.step))
    if config.publish.enable:
        hooks.append(_publish_hook(run, state))
    # Also on ranks that record nothing more for a while.
    hooks.append(lambda state, report: flush_withheld())
    hooks.append(process_hook(ProcessChecks(mesh.rank)))
    context = HookContext(
        config=config, mesh=mesh, spec=run.spec, metrics=metrics, folder=run.folder
    )
    return [*hooks, *registered_hooks(context)]


def _profiler_hook(run: RunContext, *, resume_step: int) -> Hook:
    profiler = StepProfiler(
        run.config.profiling,
        folder=run.folder,
        rank=run.mesh.rank,
        resume_step=resume_step,
        device_kind=run.mesh.device.kind,
        faults=run.faults,
    )
    run.stack.enter_context(profiler)
    return lambda state, report: profiler.step(report.number)


def _publish_hook(run: RunContext, state: TrainState) -> Hook:
    # Few runs publish; the others do not load what it needs.
    from torchtitan_lite.serving.publish.publisher import (
        Publisher,
        describe_model,
        published_tensors,
    )

    config = run.config
    publisher = Publisher(
        config.publish,
        published_tensors(state.model),
        run.mesh,
        identity=run.identity,
        folder=run.folder,
        model=describe_model(run.spec, recorded_dims(config.model)),
        secret=os.environ.get(TOKEN, ""),
    )
    run.stack.callback(publisher.close)
    if config.publish.at_start:
        publisher.publish(state.step, published_tensors(state.model))

    def hook(state: TrainState, report: StepReport) -> None:
        if report.committed:
            publisher.after_step(state.step, published_tensors(state.model))

    return hook
