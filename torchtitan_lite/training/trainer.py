"""The training loop. Its parts are in a `Job`, which `builders` creates.

A step either changes everything that it should or nothing but the data cursor; all ranks decide
alike, because they decide on the same numbers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NoReturn

import torch
from torch import nn

from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.core.errors import DamagedState, MachineFault, TrainingDiverged
from torchtitan_lite.core.events import StepEvent
from torchtitan_lite.core.phases import Phase, Phases
from torchtitan_lite.core.preemption import StopRequest, TrainingLeft
from torchtitan_lite.data import BatchSizes, microbatch_indices
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.fault_tolerance.replica import LeaveRequested, Replicas, Share
from torchtitan_lite.nn.spec import IGNORE_INDEX, Microbatch, PipelineSchedule
from torchtitan_lite.parallel.expert import RouterBalance
from torchtitan_lite.training.anomalies import ABORT, Decision, StepAction
from torchtitan_lite.training.metrics.garbage import ScheduledGarbageCollection
from torchtitan_lite.training.metrics.sample_ledger import NoLedger, StepLedger
from torchtitan_lite.training.step.anomalous_steps import handle_anomaly, report_faulty_ranks
from torchtitan_lite.training.step.kept_work import KeptWork
from torchtitan_lite.training.step.monitor import StepMonitor
from torchtitan_lite.training.step.totals import (
    NORM_EPS,
    PendingTotals,
    StepTotals,
    StepValues,
    reduce_step,
)
from torchtitan_lite.training.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The result of a step, for hooks."""

    number: int
    """Number of the attempted step, from 1."""
    committed: bool
    aborted: bool
    """A rank or a replica failed: the step is retried with the same samples."""
    stop_requested: bool
    """A rank was asked to stop, or ordered to leave the training."""
    leave_requested: bool
    """Ranks were ordered to leave the training, and none was signaled to stop."""
    loss: float
    """Mean over the step's target tokens, in nats."""
    grad_norm: float
    lr: float
    num_target_tokens: int
    num_tokens: int
    """Tokens in the step, summed over replicas."""
    num_replicas: int
    router_loads: Mapping[str, torch.Tensor]
    """Tokens per expert, float64 [experts], by router name."""
    samples: tuple[int, ...]
    """Global indices of this rank's samples."""
    data_time_s: float
    events: tuple[StepEvent, ...] = ()
    """Events of replicas, of slow ranks, of copies to other machines, and of a skipped step."""
    fatal_error: TrainingDiverged | MachineFault | None = None
    """Why the run, or this replica, ends."""
    step_time_s: float = 0.0
    checkpoint_stall_s: float = 0.0
    failed_saves: int = 0
    """Consecutive failed saves."""
    saved_step: int | None = None
    """Step of this process' newest durable checkpoint."""
    gc_time_s: float = 0.0


Hook = Callable[[TrainState, StepReport], None]
"""Called after each step on every rank; must not change the state."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The parts of a run."""

    mesh: Mesh
    replicas: Replicas
    phases: Phases
    state: TrainState
    pipeline_schedule: PipelineSchedule
    router_balance: RouterBalance
    checkpoints: CheckpointManager
    garbage: ScheduledGarbageCollection
    hooks: Sequence[Hook]
    stop: StopRequest
    steps: int
    batch_sizes: BatchSizes
    local_batch_size: int
    seq_len: int
    max_norm: float
    monitor: StepMonitor
    train_timeout_s: float
    ledger: StepLedger = field(default_factory=NoLedger)
    kept_work: KeptWork = field(default_factory=KeptWork)
    step_context: Callable[[int], AbstractContextManager[object]] = nullcontext
    """Returns the context of a step, given its number."""


def train(job: Job) -> bool:
    """Train until the last step, or until a rank is asked to stop; then save.

    Returns whether the last step was reached. Raises TrainingDiverged if anomalies end the run,
    with the last good state saved, and TrainingLeft if the ranks were ordered to leave before.
    """
    state, phases = job.state, job.phases
    phases.enter(Phase.BETWEEN)
    stop_requested = False
    first = True
    while state.step < job.steps and not stop_requested:
        started = time.perf_counter()
        try:
            with job.step_context(state.step + 1), phases.enter(Phase.COMPUTE):
                report = train_step(job)
        except LeaveRequested:
            if not job.stop.was_signaled:
                # The ranks continue on another mesh.
                raise TrainingLeft from None
            break
        stop_requested = report.stop_requested
        with phases.enter(Phase.CHECKPOINT):
            stall_s = job.checkpoints.after_step() if report.committed else 0.0
        gc_s = job.garbage.step(report.number)
        report = replace(
            report,
            step_time_s=time.perf_counter() - started,
            checkpoint_stall_s=stall_s,
            failed_saves=job.checkpoints.consecutive_failures,
            saved_step=job.checkpoints.saved_step,
            events=(*report.events, *job.checkpoints.events()),
            gc_time_s=gc_s,
        )
        for hook in job.hooks:
            hook(state, report)
        if report.fatal_error is not None:
            _end(job, report, report.fatal_error)
        if report.leave_requested and state.step < job.steps:
            phases.enter(Phase.CHECKPOINT)
            job.checkpoints.keep_last_step()
            raise TrainingLeft
        if first:
            # The first step compiles and connects, and is given longer.
            job.mesh.set_timeout(job.train_timeout_s)
            first = False
    job.replicas.close()
    phases.enter(Phase.CHECKPOINT)
    finished = state.step >= job.steps
    job.checkpoints.final_save(finished=finished)
    phases.enter(Phase.END)
    return finished


def _end(job: Job, report: StepReport, why: TrainingDiverged | MachineFault) -> NoReturn:
    """Save the last good state, and raise `why` with its path."""
    job.replicas.close()
    job.phases.enter(Phase.CHECKPOINT)
    if isinstance(why, DamagedState) or (isinstance(why, MachineFault) and report.num_replicas > 1):
        # The other replicas have the state, computed by machines that are not faulty.
        raise why
    job.state.statistics.reset_counts()
    folder = job.checkpoints.final_save(finished=False)
    saved = f", saved in {folder}." if folder else ", and checkpoint.enable is false."
    raise type(why)(f"{why} The weights are those of step {job.state.step}{saved}")


def train_step(job: Job) -> StepReport:
    """Run one step: agree, load, forward and backward, reduce, decide, apply."""
    state, phases = job.state, job.phases
    parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
    with phases.enter(Phase.QUORUM):
        before = state.step, state.cursor
        share = job.replicas.agree()
        if (state.step, state.cursor) != before:
            # This replica has healed.
            job.ledger.placed(state.step, state.cursor)
        share = _exchange_kept_work(job, share)
        job.checkpoints.set_writer_group(job.replicas.writer_group)
    # Samples in the step, over all replicas. `_apply` moves the cursor, on which they depend.
    step_size = share.step_size(job.batch_sizes.at(state.cursor))
    with job.monitor.observe():
        with phases.enter(Phase.DATA):
            samples, microbatches, data_time_s = _load(job, share)
            all_microbatches = [*job.kept_work.microbatches, *microbatches]
            _record_attempt(job, share, step_size, all_microbatches)
            job.monitor.work_times.waited_for_data(data_time_s, state.loader.take_state_wait_s())
        loss = _forward_backward(job, microbatches, parameters)
    job.monitor.end_backward(parameters, share)
    values, number = _local_values(job, share, all_microbatches, loss), state.step + 1
    with phases.enter(Phase.COMMUNICATION):
        pending = reduce_step(values, parameters, job.replicas, job.mesh, job.stop)
        job.monitor.work_times.mark_reduction()
        with phases.enter(Phase.COMPUTE):
            is_updated = _update_on_device(job, pending)
        totals = pending.read()
        job.monitor.work_times.mark_totals()
        is_complete = job.replicas.should_commit(
            totals.num_ranks, totals.cursor_sum, totals.step_sum
        )
        if is_complete:
            job.checkpoints.apply_signals(totals.save_signals)
        decision, slow_ranks = job.monitor.decide(
            totals,
            loss,
            microbatches,
            state.statistics,
            share,
            job.replicas,
            number=number,
            is_complete=is_complete,
        )
    lr = state.lr_scheduler.lr(state.step)
    if decision.action is StepAction.COMMIT and not is_updated:
        _update(job, totals)
    kept = _kept_event(job, share, samples)
    if keeps := decision == ABORT and job.replicas.keeps_gradients:
        position = state.step, state.cursor
        job.kept_work.add(position, samples, _round_size(job), all_microbatches, loss)
    else:
        job.kept_work.clear()
    router_loads, events, fatal_error = _apply(job, decision, totals, share, step_size, keeps=keeps)
    job.ledger.end(decision.action.value, state.step, state.cursor)
    committed = decision.action is StepAction.COMMIT
    stop_requested, is_signaled = totals.num_stop_requests > 0, totals.num_signaled > 0
    is_last = stop_requested or fatal_error is not None or state.step >= job.steps
    job.replicas.finish_step(committed=committed, is_last=is_last)
    job.monitor.end_step(state.optimized_tensors)
    # Semi-synchronous replicas have the same state only after they have averaged it.
    job.checkpoints.set_writer_group(job.replicas.writer_group)
    return StepReport(
        number=number,
        committed=committed,
        aborted=decision.action is StepAction.ABORT,
        stop_requested=stop_requested,
        leave_requested=stop_requested and not is_signaled,
        loss=totals.mean_loss,
        grad_norm=totals.grad_norm,
        lr=lr,
        num_target_tokens=round(totals.num_targets),
        num_tokens=step_size * job.seq_len,
        num_replicas=share.count,
        router_loads=router_loads,
        samples=_samples_of(all_microbatches),
        data_time_s=data_time_s,
        events=(*job.replicas.events(), *kept, *slow_ranks, *events),
        fatal_error=fatal_error,
    )


def _round_size(job: Job) -> int:
    """Return the samples of one microbatch on each rank of this replica."""
    return job.local_batch_size * job.mesh.degrees.batch


def _exchange_kept_work(job: Job, share: Share) -> Share:
    """Return the share with what the participants have computed of the step before it was aborted;
    work of this replica that does not count is dropped."""
    state, kept = job.state, job.kept_work
    num_rounds = job.batch_sizes.at(state.cursor) // _round_size(job)
    position = state.step, state.cursor
    share = job.replicas.exchange_kept_work(share, lambda: kept.computed(position, num_rounds))
    if kept.rounds and not kept.fits(share, job.pipeline_schedule.min_microbatches):
        kept.clear()
        state.optimizer.zero_grad()
        job.router_balance.reset()
    return share


def _kept_event(job: Job, share: Share, samples: Sequence[range]) -> list[StepEvent]:
    """Return the event of a step for which participants have kept work."""
    if not share.reuses_work(job.pipeline_schedule.min_microbatches):
        return []
    kept, computed = len(job.kept_work.rounds) * _round_size(job), sum(map(len, samples))
    return [StepEvent("kept_work", {"samples_kept": kept, "samples_computed": computed})]


def _load(job: Job, share: Share) -> tuple[Sequence[range], list[Microbatch], float]:
    """Return the samples that this replica computes, this rank's microbatches of them, and the
    seconds waited for these; the next step's are prefetched."""
    started = time.perf_counter()
    state, cursor = job.state, job.state.cursor
    # A replica's share must not have fewer microbatches than its pipeline can run.
    fewest, batch_size = job.pipeline_schedule.min_microbatches, job.batch_sizes.at(cursor)

    def indices(samples: Sequence[range]) -> list[range]:
        local, mesh = job.local_batch_size, job.mesh
        of_parts = (
            microbatch_indices(part, local, mesh.batch_rank, mesh.degrees.batch) for part in samples
        )
        return [*chain.from_iterable(of_parts)]

    samples = share.parts(cursor, batch_size, _round_size(job), fewest)
    microbatches = state.loader.load(indices(samples), state.step + 1)
    if state.step + 1 < job.steps:
        following = cursor + share.step_size(batch_size)
        size = job.batch_sizes.at(following)
        part = share.samples(following, size, _round_size(job), fewest)
        state.loader.prefetch(indices([part]), state.step + 2)
    return samples, microbatches, time.perf_counter() - started


def _record_attempt(
    job: Job, share: Share, step_size: int, microbatches: Sequence[Microbatch]
) -> None:
    job.ledger.begin(
        job.state.step + 1,
        job.state.cursor,
        step_size,
        share=(share.index, share.count),
        token=job.replicas.writer_group.token,
        samples=_samples_of(microbatches),
    )


def _samples_of(microbatches: Sequence[Microbatch]) -> tuple[int, ...]:
    return tuple(sample for mb in microbatches for sample in mb.samples)


def _forward_backward(
    job: Job, microbatches: Sequence[Microbatch], parameters: Sequence[nn.Parameter]
) -> torch.Tensor:
    """Accumulate the gradients of the loss summed over this rank's targets. Returns the sum, 0-d
    float64, kept work included."""
    loss = torch.zeros((), dtype=torch.float64, device=job.mesh.device.torch_device)
    job.monitor.begin_forward()
    if microbatches:
        overlap = partial(job.replicas.reduce_during_backward, parameters)
        loss += job.pipeline_schedule.run(microbatches, backward=True, before_last=overlap)
    return loss if job.kept_work.loss is None else loss + job.kept_work.loss


def _local_values(
    job: Job, share: Share, microbatches: Sequence[Microbatch], loss: torch.Tensor
) -> StepValues:
    """Collect this rank's values to reduce. Blocks until the snapshot of the previous step is
    complete: from here on the state may be modified."""
    return StepValues(
        loss=loss,
        num_targets=sum(int((mb.targets_BS != IGNORE_INDEX).sum()) for mb in microbatches),
        cursor=job.state.cursor,
        step=job.state.step,
        save_signals=job.checkpoints.local_signals(),
        work_times=job.monitor.work_times.local_values(share, job.checkpoints.last_write),
        rank_flags=job.monitor.rank_flags(loss, job.state.optimized_tensors, share),
        router_counts=job.router_balance.counts(loss.device),
    )


def _apply(
    job: Job,
    decision: Decision,
    totals: StepTotals,
    share: Share,
    step_size: int,
    *,
    keeps: bool,
) -> tuple[Mapping[str, torch.Tensor], list[StepEvent], TrainingDiverged | MachineFault | None]:
    """Apply the decision to everything but weights and optimizer: commit, skip, or leave the state
    as it was. `keeps`: gradients and loads of an aborted step are kept. Returns the router loads,
    the events, and why the run ends, if it does."""
    state, number = job.state, job.state.step + 1
    committed = decision.action is StepAction.COMMIT
    samples = range(state.cursor, state.cursor + step_size)
    if decision.action is not StepAction.ABORT:
        # An aborted step is retried with the same samples.
        state.cursor = samples.stop
    if committed:
        state.step += 1
        state.tokens += step_size * job.seq_len
        window = job.monitor.detector.window
        state.statistics.record_commit(
            state.step, totals.mean_loss, totals.grad_norm, window=window
        )
    router_loads = job.router_balance.apply(totals.router_counts, committed=committed)
    if not keeps:
        job.router_balance.reset()
        state.optimizer.zero_grad()
    if decision.faulty_ranks:
        return router_loads, *report_faulty_ranks(decision, number, share, job.mesh.world_size)
    if not decision.is_anomalous:
        return router_loads, [], None
    with job.phases.enter(Phase.CHECKPOINT):
        outcome = handle_anomaly(
            decision,
            totals,
            state,
            job.checkpoints,
            job.replicas,
            share,
            samples=samples,
            roll_back_steps=job.monitor.detector.roll_back_steps,
        )
    return router_loads, *outcome


def _update_on_device(job: Job, pending: PendingTotals) -> bool:
    """Start to clip the gradients and update the weights before the host knows the totals, unless
    the step is anomalous. Returns false if this run must wait for them.

    The device then has work while the host waits. Replicas vote about a step, and spikes depend on
    the statistics, so those decisions are the host's.
    """
    state = job.state
    if not (
        job.replicas.always_commits
        and job.monitor.detector.ignores_history
        and state.optimizer.can_step_unless(job.mesh.device.torch_device)
    ):
        return False
    divisor, skip = pending.divisor_and_skip(job.max_norm)
    state.optimizer.step_unless(skip, state.lr_scheduler.lr(state.step), divisor)
    return True


def _update(job: Job, totals: StepTotals) -> None:
    """Clip the gradients, and update the weights."""
    state = job.state
    # Gradients are of the loss summed over target tokens. Here they are divided by the number of
    # targets, as `StepTotals` divides loss and norm.
    factor = min(1.0, job.max_norm / (totals.grad_norm + NORM_EPS)) / totals.num_targets
    state.optimizer.step(state.lr_scheduler.lr(state.step), factor)
