"""Build the `Job`: what the training loop needs around the restored state."""

from collections.abc import Sequence

from torch import nn

from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.data import OpenedData, batch_sizes
from torchtitan_lite.fault_tolerance.replica import SingleReplica
from torchtitan_lite.parallel.expert import RouterBalance, routers_of
from torchtitan_lite.training.builders.hooks import build_hooks
from torchtitan_lite.training.builders.model import model_on_meta
from torchtitan_lite.training.builders.run_context import RunContext
from torchtitan_lite.training.builders.schedule import build_schedule
from torchtitan_lite.training.builders.state import RestoredState
from torchtitan_lite.training.builders.watching import build_monitor, open_ledger
from torchtitan_lite.training.metrics import GoodputTracker, Metrics
from torchtitan_lite.training.metrics.garbage import ScheduledGarbageCollection
from torchtitan_lite.training.step.state_check import StateCheck
from torchtitan_lite.training.text_generator import TextGenerator
from torchtitan_lite.training.trainer import Job


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
    schedule, step_context = build_schedule(run, parts, state)
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
        monitor=build_monitor(run, state, schedule, state_check),
        ledger=open_ledger(run, restored),
        stop=stop,
        steps=training.steps,
        batch_sizes=batch_sizes(training, mesh.degrees.batch),
        local_batch_size=local_batch_size,
        seq_len=training.seq_len,
        max_norm=training.max_norm,
        train_timeout_s=config.comm.train_timeout_seconds,
        step_context=step_context,
    )
