"""The training loop. Its parts are in a `Job`, which `build.py` creates.

A step either changes everything that it should or nothing but the data cursor; all ranks decide
alike, because they decide on the same numbers. Layer: above config and replica.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from torchtitan_lite.anomalies import REPEAT, Action, Judge
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.data import share_of_step
from torchtitan_lite.errors import MachineFault, TrainingDiverged
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.metrics.garbage import ScheduledGarbageCollection
from torchtitan_lite.optim import local_gradients, scale_, square_norm
from torchtitan_lite.parallel.expert import RouterBalance
from torchtitan_lite.phases import Phase, Phases
from torchtitan_lite.preemption import StopRequest
from torchtitan_lite.replica import LeaveRequested, ReplicaEvent, Replicas, Share
from torchtitan_lite.spec import IGNORE, Microbatch, Schedule
from torchtitan_lite.step.numbers import Numbers, counted
from torchtitan_lite.step.refusal import blame, refuse
from torchtitan_lite.step.replay import Replay
from torchtitan_lite.step.work_times import WorkTimes
from torchtitan_lite.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The result of a step, for hooks."""

    number: int
    """Number of the attempted step, from 1."""
    committed: bool
    failed: bool
    """A replica was lost: the step is retried with the same samples."""
    leave: bool
    """A rank was asked to leave."""
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
    events: tuple[ReplicaEvent, ...] = ()
    """Events of replicas, of slow ranks, and of a skipped step."""
    end: TrainingDiverged | MachineFault | None = None
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
    schedule: Schedule
    router_balance: RouterBalance
    checkpoints: CheckpointManager
    garbage: ScheduledGarbageCollection
    hooks: Sequence[Hook]
    stop: StopRequest
    steps: int
    global_batch_size: int
    local_batch_size: int
    seq_len: int
    max_norm: float
    replay: Replay
    judge: Judge
    work_times: WorkTimes
    train_timeout_s: float
    step_context: Callable[[int], AbstractContextManager[object]] = nullcontext
    """Returns the context of a step, given its number."""


def train(job: Job) -> bool:
    """Train until the last step, or until a rank is asked to leave; then save.

    Returns whether the last step was reached. Raises TrainingDiverged if anomalies end the run,
    with the last good state saved.
    """
    state = job.state
    leave = False
    first = True
    while state.step < job.steps and not leave:
        started = time.perf_counter()
        try:
            with job.step_context(state.step + 1):
                report = train_step(job)
        except LeaveRequested:
            break
        leave = report.leave
        job.phases.enter(Phase.CHECKPOINT, state.step)
        stall_s = job.checkpoints.after_step() if report.committed else 0.0
        job.phases.enter(Phase.BETWEEN, state.step)
        gc_s = job.garbage.step(report.number)
        report = replace(
            report,
            step_time_s=time.perf_counter() - started,
            checkpoint_stall_s=stall_s,
            failed_saves=job.checkpoints.consecutive_failures,
            saved_step=job.checkpoints.saved_step,
            gc_time_s=gc_s,
        )
        for hook in job.hooks:
            hook(state, report)
        if report.end is not None:
            _end(job, report, report.end)
        if first:
            # The first step compiles and connects, and is given longer.
            job.mesh.set_timeout(job.train_timeout_s)
            first = False
    job.replicas.close()
    job.phases.enter(Phase.CHECKPOINT, state.step)
    finished = state.step >= job.steps
    job.checkpoints.final_save(finished=finished)
    job.phases.enter(Phase.END, state.step)
    return finished


def _end(job: Job, report: StepReport, why: TrainingDiverged | MachineFault) -> NoReturn:
    """Save the last good state, and raise `why` with its path."""
    job.replicas.close()
    job.phases.enter(Phase.CHECKPOINT, job.state.step)
    if isinstance(why, MachineFault) and report.num_replicas > 1:
        # The others have it, from machines that can be trusted.
        raise why
    job.state.history.forget_rows()
    folder = job.checkpoints.final_save(finished=False)
    saved = f", saved in {folder}." if folder else ", and checkpoint.enable is false."
    raise type(why)(f"{why} The weights are those of step {job.state.step}{saved}")


def train_step(job: Job) -> StepReport:
    """Run one step: agree, load, forward and backward, reduce, decide, apply."""
    state = job.state
    job.phases.enter(Phase.QUORUM, state.step)
    share = job.replicas.agree()
    job.phases.enter(Phase.DATA, state.step)
    job.checkpoints.set_writer_group(job.replicas.writer_group)
    job.work_times.begin()
    microbatches, data_time_s = _take(job, share)
    job.phases.enter(Phase.COMPUTE, state.step)
    parameters = list(state.model.parameters())
    numbers = _forward_and_backward(job, share, microbatches, parameters)
    job.phases.enter(Phase.COMMUNICATION, state.step)
    job.replicas.reduce(parameters, numbers.of_step)
    gradients = local_gradients(parameters)
    totals = numbers.totals(square_norm(gradients), job.stop.requested, job.mesh)
    settled = job.replicas.should_commit(totals.num_ranks, totals.places, totals.steps)
    job.phases.enter(Phase.COMPUTE, state.step)
    if settled:
        job.checkpoints.apply_signals(totals.signals)
    slow = job.work_times.settle(totals.times, settled=settled)

    # The loss is a sum over target tokens: this is where it is divided, once, by their number.
    targets = totals.targets / job.mesh.degrees.token_copies
    loss = totals.loss / targets if targets else math.nan
    is_number = targets and totals.squares >= 0
    grad_norm = math.sqrt(totals.squares) / targets if is_number else math.nan
    lr = state.schedule.lr(state.step)
    number, step_size = state.step + 1, share.step_size(job.global_batch_size)
    verdict = job.judge.judge(loss, grad_norm, state.history) if settled else REPEAT
    differing = []
    if verdict.is_suspicious:
        # Ranks wait for each other in it, and for other replicas.
        job.phases.enter(Phase.COMMUNICATION, state.step)
        differing = job.replay.differing(microbatches, share, job.replicas)
        settled = differing == []
    committed = verdict.action is Action.COMMIT
    if committed:
        scale_(gradients, min(1.0, job.max_norm / (grad_norm + 1e-6)) / targets)
        state.optimizer.step(lr)
        state.step += 1
        state.tokens += step_size * job.seq_len
        state.history.committed(state.step, loss, grad_norm, window=job.judge.window)
    router_loads = job.router_balance.apply(totals.router_counts, committed=committed)
    state.optimizer.zero_grad()
    if settled:
        state.cursor += step_size
    news, end = [], None
    if differing:
        news, end = blame(differing, number, share, job.mesh.world_size)
    elif settled and not committed:
        job.phases.enter(Phase.CHECKPOINT, state.step)
        news, end = refuse(
            verdict,
            state,
            job.checkpoints,
            job.replicas,
            share,
            loss=loss,
            grad_norm=grad_norm,
            samples=range(state.cursor - step_size, state.cursor),
            roll_back_steps=job.judge.roll_back_steps,
        )
    if committed:
        job.replicas.synchronize()
        job.checkpoints.set_writer_group(job.replicas.writer_group)
    if not totals.leave and end is None and state.step < job.steps:
        job.replicas.start_quorum()
    return StepReport(
        number=number,
        committed=committed,
        failed=not settled,
        leave=totals.leave > 0,
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        num_target_tokens=round(targets),
        num_tokens=step_size * job.seq_len,
        num_replicas=share.count,
        router_loads=router_loads,
        samples=tuple(sample for mb in microbatches for sample in mb.samples),
        data_time_s=data_time_s,
        events=(*job.replicas.events(), *slow, *news),
        end=end,
    )


def _forward_and_backward(
    job: Job, share: Share, microbatches: Sequence[Microbatch], parameters: Sequence[nn.Parameter]
) -> Numbers:
    """Run forward and backward, and collect the numbers to reduce."""
    device = job.mesh.device.torch_device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    job.replay.begin()
    if microbatches:
        overlap = partial(job.replicas.reduce_during_backward, parameters)
        loss_sum += job.schedule.run(microbatches, backward=True, before_last=overlap)
    job.replay.end(loss_sum)
    job.work_times.end(len(microbatches))
    return counted(
        loss_sum,
        sum(int((mb.targets_BS != IGNORE).sum()) for mb in microbatches),
        cursor=job.state.cursor,
        step=job.state.step,
        # From here on the state may change: the snapshot of the step before is complete.
        signals=job.checkpoints.local_signals(device),
        times=job.work_times.counted(share, device),
        router_counts=job.router_balance.counts(device),
    )


def _take(job: Job, share: Share) -> tuple[list[Microbatch], float]:
    """Return this rank's microbatches and the seconds waited for them; the next step's are
    prefetched."""
    started = time.perf_counter()
    state, degrees, local = job.state, job.mesh.degrees, job.local_batch_size

    def indices(cursor: int) -> list[range]:
        # What is left for a replica may not be fewer than its pipeline can take.
        fewest = job.schedule.min_microbatches
        samples = share.samples(cursor, job.global_batch_size, local * degrees.batch, fewest)
        return share_of_step(samples, local, job.mesh.batch_rank, degrees.batch)

    microbatches = state.loader.take(indices(state.cursor), state.step + 1)
    if state.step + 1 < job.steps:
        following = state.cursor + share.step_size(job.global_batch_size)
        state.loader.prefetch(indices(following), state.step + 2)
    return microbatches, time.perf_counter() - started
