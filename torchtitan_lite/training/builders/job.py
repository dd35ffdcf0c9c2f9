"""Build the `Job`: the pipeline schedule, the step monitor, the hooks and the replicas around the
restored state."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from torch import nn

from torchtitan_lite.checkpoint import (
    RunHistory,
    replica_run_id,
    run_on_all_ranks,
    shared_run_id,
)
from torchtitan_lite.config import Config, config_fingerprint
from torchtitan_lite.config.tables.training import CROSS_ENTROPY
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.core.outputs import sample_ledger
from torchtitan_lite.core.phases import Phases
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.core.rank.supervised import LAUNCHER_PID, announce, is_restarted
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.data import OpenedData, batch_sizes
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.rpc.authentication import TOKEN
from torchtitan_lite.distributed.torch_compat import collective_waits
from torchtitan_lite.fault_tolerance.replica import Replicas, SingleReplica
from torchtitan_lite.models import recorded_dims
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import MicrobatchLoss, ModelSpec, PipelineSchedule
from torchtitan_lite.parallel import build_pipeline_schedule
from torchtitan_lite.parallel.expert import RouterBalance, routers_of
from torchtitan_lite.parallel.fsdp import compute_dtype_of
from torchtitan_lite.serving.publish.publisher import Publisher, describe_model, published_tensors
from torchtitan_lite.training.anomalies import AnomalyDetector
from torchtitan_lite.training.anomalies.process_checks import ProcessChecks
from torchtitan_lite.training.builders.model import model_on_meta
from torchtitan_lite.training.builders.samples import sample_prompt
from torchtitan_lite.training.builders.state import RestoredState
from torchtitan_lite.training.debug import (
    ScheduleInside,
    StepTracer,
    explicit_redistribution,
    traced_step,
)
from torchtitan_lite.training.hooks import (
    HookContext,
    goodput_hook,
    metrics_hook,
    process_hook,
    registered_hooks,
    validation_hook,
)
from torchtitan_lite.training.metrics import GoodputTracker, Metrics
from torchtitan_lite.training.metrics.garbage import ScheduledGarbageCollection
from torchtitan_lite.training.metrics.profiler import StepProfiler
from torchtitan_lite.training.metrics.sample_ledger import NoLedger, SampleLedger, StepLedger
from torchtitan_lite.training.step.monitor import StepMonitor
from torchtitan_lite.training.step.replay import TOLERANCE, Replay
from torchtitan_lite.training.step.state_check import StateCheck
from torchtitan_lite.training.step.work_times import WorkTimes
from torchtitan_lite.training.text_generator import TextGenerator
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import Hook, Job, StepReport

StepContext = Callable[[int], AbstractContextManager[object]]


def build_job(
    config: Config,
    spec: ModelSpec,
    mesh: Mesh,
    stop: StopRequest,
    stack: ExitStack,
    *,
    parts: Sequence[nn.Module],
    data: OpenedData,
    restored: RestoredState,
    phases: Phases,
    metrics: Metrics,
    goodput_tracker: GoodputTracker | None,
    text_generator: TextGenerator | None,
    folder: Path,
    faults: OutputFaults,
    state_check: StateCheck | None,
) -> Job:
    """Build the job of a single replica around `restored`. `parts` are this rank's parts of the
    model, `folder` is for outputs; `stack` closes what is opened; `state_check`, if configured,
    listens to the phases."""
    state, training = restored.state, config.training
    schedule = _build_schedule(config, spec, mesh, parts)
    schedule, step_context = _debug_schedule(config, mesh, parts, schedule, state, folder, faults)
    names = list(routers_of(model_on_meta(config, spec)))
    balance = RouterBalance(state.model, names, spec.num_experts, mesh, config.parallelism)
    garbage = stack.enter_context(ScheduledGarbageCollection(training.gc_freq, training.gc_debug))
    hooks = _build_hooks(
        config,
        stack,
        schedule=schedule,
        metrics=metrics,
        goodput_tracker=goodput_tracker,
        data=data,
        spec=spec,
        text_generator=text_generator,
        state=state,
        mesh=mesh,
        folder=folder,
        faults=faults,
    )
    local_batch_size = training.local_batch_size
    if mesh.degrees.pp > 1:
        local_batch_size = config.parallelism.pipeline_parallel_microbatch_size
    return Job(
        mesh=mesh,
        replicas=SingleReplica(),
        phases=phases,
        state=state,
        pipeline_schedule=schedule,
        router_balance=balance,
        checkpoints=restored.checkpoints,
        monitor=_build_monitor(config, mesh, state, schedule, phases, state_check, stack),
        garbage=garbage,
        hooks=hooks,
        ledger=_open_ledger(config, mesh, restored, folder, stack, faults),
        stop=stop,
        steps=training.steps,
        batch_sizes=batch_sizes(training, mesh.degrees.batch),
        local_batch_size=local_batch_size,
        seq_len=training.seq_len,
        max_norm=training.max_norm,
        train_timeout_s=config.comm.train_timeout_seconds,
        step_context=step_context,
    )


def _build_schedule(
    config: Config, spec: ModelSpec, mesh: Mesh, parts: Sequence[nn.Module]
) -> PipelineSchedule:
    loss_backend = config.compile.backend if config.compile.covers("loss") else None
    return build_pipeline_schedule(
        parts,
        spec,
        cross_entropy(
            logits_per_chunk=mesh.device.logits_per_chunk,
            compile_backend=loss_backend,
            z_loss_weight=config.training.z_loss_weight,
        ),
        mesh,
        config.parallelism,
        hidden_dtype=compute_dtype_of(config.training, mesh.device),
        is_compiled=config.compile.covers("model"),
        training_loss=_registered_loss(config),
    )


def _registered_loss(config: Config) -> MicrobatchLoss | None:
    """Create the loss that `training.loss` names; None for cross entropy."""
    if config.training.loss == CROSS_ENTROPY:
        return None
    return REGISTRY.losses[config.training.loss](config)


def _debug_schedule(
    config: Config,
    mesh: Mesh,
    parts: Sequence[nn.Module],
    schedule: PipelineSchedule,
    state: TrainState,
    folder: Path,
    faults: OutputFaults,
) -> tuple[PipelineSchedule, StepContext]:
    """Wrap the schedule in what `[debug]` asks for. Returns the context of a step, too."""
    if config.debug.explicit_redistribution:
        schedule = ScheduleInside(schedule, explicit_redistribution(parts))
    if not config.debug.trace_communication:
        return schedule, nullcontext
    number = traced_step(
        config.debug.trace_communication_step,
        resume_step=state.step,
        last_step=config.training.steps,
    )
    trace = StepTracer(
        parts, mesh, traced_step=number, folder=folder, tensors=state.tensors, faults=faults
    )
    return ScheduleInside(schedule, trace.in_schedule), trace.step


def _build_monitor(
    config: Config,
    mesh: Mesh,
    state: TrainState,
    schedule: PipelineSchedule,
    phases: Phases,
    state_check: StateCheck | None,
    stack: ExitStack,
) -> StepMonitor:
    replay = None
    if config.fault_tolerance.replay_check:
        is_exact = mesh.device.kind == "cpu" or config.debug.deterministic
        tolerance = 0.0 if is_exact else TOLERANCE
        replay = Replay(state.model, schedule, state.optimizer, mesh, tolerance=tolerance)
    detector = AnomalyDetector(config.anomalies, config.debug.max_skipped_steps)
    waits = None
    if mesh.device.kind == "cpu":
        # On a GPU the stream waits, and not the host.
        waits = stack.enter_context(collective_waits())
    work_times = WorkTimes(mesh, config.fault_tolerance.replica or 0, waits)
    return StepMonitor(detector, work_times, replay, phases, mesh, state_check)


def _build_hooks(
    config: Config,
    stack: ExitStack,
    *,
    schedule: PipelineSchedule,
    metrics: Metrics,
    goodput_tracker: GoodputTracker | None,
    data: OpenedData,
    spec: ModelSpec,
    text_generator: TextGenerator | None,
    state: TrainState,
    mesh: Mesh,
    folder: Path,
    faults: OutputFaults,
) -> list[Hook]:
    """Build the hooks in the order in which they run after each step."""
    total_steps = config.training.steps
    cost = spec.cost(config.training.seq_len)
    tracker = goodput_tracker
    hooks = [
        metrics_hook(metrics, mesh, cost=cost, goodput_tracker=tracker, total_steps=total_steps)
    ]
    if tracker is not None and config.checkpoint.enable:
        hooks.append(goodput_hook(config.checkpoint.interval, tracker, metrics))
    if data.validation is not None:
        texts = _validation_samples(config, data, text_generator)
        freq = config.validation.freq
        hooks.append(
            validation_hook(freq, total_steps, data.validation, schedule, metrics, mesh, texts)
        )
    if config.profiling.enable_profiling or config.profiling.enable_memory_snapshot:
        profiler = StepProfiler(
            config.profiling,
            folder=folder,
            rank=mesh.rank,
            resume_step=state.step,
            device_kind=mesh.device.kind,
            faults=faults,
        )
        stack.enter_context(profiler)
        hooks.append(lambda state, report: profiler.step(report.number))
    if config.publish.enable:
        hooks.append(_publish_hook(config, stack, spec=spec, state=state, mesh=mesh, folder=folder))
    hooks.append(process_hook(ProcessChecks(mesh.rank)))
    context = HookContext(config=config, mesh=mesh, spec=spec, metrics=metrics, folder=folder)
    return [*hooks, *registered_hooks(context)]


def _publish_hook(
    config: Config,
    stack: ExitStack,
    *,
    spec: ModelSpec,
    state: TrainState,
    mesh: Mesh,
    folder: Path,
) -> Hook:
    run_id = run_on_all_ranks(lambda: shared_run_id(Path(config.job.dump_folder)))
    if config.fault_tolerance.enable:
        run_id = replica_run_id(run_id, config.fault_tolerance.replica_id)
    publisher = Publisher(
        config.publish,
        published_tensors(state.model),
        mesh,
        run_id=run_id,
        folder=folder,
        model=describe_model(spec, recorded_dims(config.model)),
        secret=os.environ.get(TOKEN, ""),
    )
    stack.callback(publisher.close)
    if config.publish.at_start:
        publisher.publish(state.step, published_tensors(state.model))

    def hook(state: TrainState, report: StepReport) -> None:
        if report.committed:
            publisher.after_step(state.step, published_tensors(state.model))

    return hook


def _open_ledger(
    config: Config,
    mesh: Mesh,
    restored: RestoredState,
    folder: Path,
    stack: ExitStack,
    faults: OutputFaults,
) -> StepLedger:
    if not config.debug.sample_ledger:
        return NoLedger()
    # Without the launcher nobody knows whether a replica that begins anew joins a run.
    by_hand = config.fault_tolerance.enable and LAUNCHER_PID not in os.environ
    ledger = SampleLedger(
        sample_ledger(folder, mesh.rank),
        faults,
        continues=restored.is_resumed or is_restarted() or by_hand,
        session=f"{mesh.broadcast_int(time.time_ns()):x}",
        step=restored.state.step,
        cursor=restored.state.cursor,
        rank=mesh.rank,
        batch_rank=mesh.batch_rank,
    )
    stack.callback(ledger.close)
    return ledger


def build_text_generator(
    config: Config, spec: ModelSpec, data: OpenedData, mesh: Mesh
) -> TextGenerator:
    """Build the copy of the model that generates text. Every rank must call it. Raises ConfigError
    for a model that cannot."""
    whole = model_on_meta(config, spec)
    return TextGenerator(whole, spec, mesh, data.tokenizer(), seed=config.debug.seed or 0)


def _validation_samples(
    config: Config, data: OpenedData, text_generator: TextGenerator | None
) -> Callable[[TrainState], Sequence[str]] | None:
    """Return the function that generates the texts of a validation; None without one."""
    if text_generator is None:
        return None
    validation = config.validation
    prompt = sample_prompt(config, data, validation.sample_prompt)
    if prompt is None:
        return None
    return partial(
        text_generator.texts,
        prompt=prompt,
        count=validation.samples,
        max_new_tokens=validation.sample_tokens,
        temperature=validation.sample_temperature,
    )


@contextmanager
def join_replicas(
    config: Config, mesh: Mesh, stop: StopRequest, restored: RestoredState, phases: Phases
) -> Iterator[Replicas]:
    """Join the other replicas, and leave them at the end of the block."""
    # Imported here because importing torchft takes a second.
    from torchtitan_lite.fault_tolerance.replica.joining import join

    checkpoints = restored.checkpoints
    announce("joining")
    with join(
        config.fault_tolerance,
        restored.state,
        mesh,
        run_id=shared_run_id(Path(config.job.dump_folder)) if mesh.is_leader else "",
        history=RunHistory(Path(config.job.dump_folder), config.fault_tolerance.replica_id),
        config_fingerprint=config_fingerprint(config, mesh.world_size),
        newest_stored_step=checkpoints.newest_stored,
        wait_until_modifiable=checkpoints.wait_for_snapshot,
        stop_requested=lambda: stop.requested,
        initial_stored_step=checkpoints.stored_before,
        phases=phases,
        averaging=restored.averaging,
    ) as replicas:
        yield replicas
