"""Build the `Job`: what the training loop needs around the restored state."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from torchtitan_lite.config import Config
from torchtitan_lite.config.tables.training import CROSS_ENTROPY
from torchtitan_lite.core.outputs import sample_ledger
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.core.rank.supervised import LAUNCHER_PID, is_restarted
from torchtitan_lite.core.registry import REGISTRY
from torchtitan_lite.data import OpenedData, batch_sizes
from torchtitan_lite.distributed.torch_compat import collective_waits
from torchtitan_lite.fault_tolerance.replica import SingleReplica
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import MicrobatchLoss, PipelineSchedule
from torchtitan_lite.parallel import build_pipeline_schedule
from torchtitan_lite.parallel.expert import RouterBalance, routers_of
from torchtitan_lite.parallel.precision import precision_policy
from torchtitan_lite.training.anomalies import AnomalyDetector
from torchtitan_lite.training.builders.hooks import build_hooks
from torchtitan_lite.training.builders.model import model_on_meta
from torchtitan_lite.training.builders.run_context import RunContext
from torchtitan_lite.training.builders.state import RestoredState
from torchtitan_lite.training.debug import (
    ScheduleInside,
    StepTracer,
    explicit_redistribution,
    traced_step,
)
from torchtitan_lite.training.metrics import GoodputTracker, Metrics
from torchtitan_lite.training.metrics.garbage import ScheduledGarbageCollection
from torchtitan_lite.training.metrics.sample_ledger import NoLedger, SampleLedger, StepLedger
from torchtitan_lite.training.step.monitor import StepMonitor
from torchtitan_lite.training.step.replay import TOLERANCE, Replay
from torchtitan_lite.training.step.state_check import StateCheck
from torchtitan_lite.training.step.work_times import WorkTimes
from torchtitan_lite.training.text_generator import TextGenerator
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import Job

StepContext = Callable[[int], AbstractContextManager[object]]


def build_job(
    run: RunContext,
    stop: StopRequest,
    *,
    parts: Sequence[nn.Module],
    data: OpenedData,
    restored: RestoredState,
    metrics: Metrics,
    goodput_tracker: GoodputTracker | None,
    text_generator: TextGenerator | None,
    state_check: StateCheck | None,
) -> Job:
    """Build the job of a single replica around `restored`. `parts` are this rank's parts of the
    model; `state_check`, if configured, listens to the phases."""
    config, mesh, state = run.config, run.mesh, restored.state
    training = config.training
    schedule, step_context = _build_schedule(run, parts, state)
    names = list(routers_of(model_on_meta(config, run.spec)))
    balance = RouterBalance(state.model, names, run.spec.num_experts, mesh, config.parallelism)
    garbage = ScheduledGarbageCollection(training.gc_freq, training.gc_debug)
    local_batch_size = training.local_batch_size
    if mesh.degrees.pp > 1:
        local_batch_size = config.parallelism.pipeline_parallel_microbatch_size
    return Job(
        mesh=mesh,
        replicas=SingleReplica(),
        phases=run.phases,
        state=state,
        pipeline_schedule=schedule,
        router_balance=balance,
        checkpoints=restored.checkpoints,
        garbage=run.stack.enter_context(garbage),
        hooks=build_hooks(
            run,
            state,
            schedule,
            data,
            metrics,
            goodput_tracker=goodput_tracker,
            text_generator=text_generator,
        ),
        monitor=_build_monitor(run, state, schedule, state_check),
        ledger=_open_ledger(run, restored),
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


def _build_monitor(
    run: RunContext,
    state: TrainState,
    schedule: PipelineSchedule,
    state_check: StateCheck | None,
) -> StepMonitor:
    config, mesh = run.config, run.mesh
    replay = None
    if config.fault_tolerance.replay_check:
        is_exact = mesh.device.kind == "cpu" or config.debug.deterministic
        tolerance = 0.0 if is_exact else TOLERANCE
        replay = Replay(state.model, schedule, state.optimizer, mesh, tolerance=tolerance)
    detector = AnomalyDetector(config.anomalies, config.debug.max_skipped_steps)
    waits = None
    if mesh.device.kind == "cpu":
        # On a GPU the stream waits, and not the host.
        waits = run.stack.enter_context(collective_waits())
    work_times = WorkTimes(mesh, config.fault_tolerance.replica or 0, waits)
    return StepMonitor(detector, work_times, replay, run.phases, mesh, state_check)


def _open_ledger(run: RunContext, restored: RestoredState) -> StepLedger:
    config, mesh = run.config, run.mesh
    if not config.debug.sample_ledger:
        return NoLedger()
    # Without the launcher it is unknown whether a replica that begins anew joins a run.
    by_hand = config.fault_tolerance.enable and LAUNCHER_PID not in os.environ
    ledger = SampleLedger(
        sample_ledger(run.folder, mesh.rank),
        run.faults,
        continues=restored.is_resumed or is_restarted() or by_hand,
        generation_id=run.identity.generation_id,
        step=restored.state.step,
        cursor=restored.state.cursor,
        rank=mesh.rank,
        batch_rank=mesh.batch_rank,
    )
    run.stack.callback(ledger.close)
    return ledger
