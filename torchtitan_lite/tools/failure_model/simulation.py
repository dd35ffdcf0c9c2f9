"""Simulations of strategies: for numbers of ranks with random failures, for a trace, and for given
failures.

All strategies face the same failures.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.tools.failure_model.events import ClusterEvents, EventStream, RandomFailures
from torchtitan_lite.tools.failure_model.job_times import (
    JobTimes,
    job_times,
    machine_ranks,
    replica_ranks,
)
from torchtitan_lite.tools.failure_model.replicated_job import ReplicatedJob
from torchtitan_lite.tools.failure_model.scenario import Scenario
from torchtitan_lite.tools.failure_model.strategies import Strategy
from torchtitan_lite.tools.failure_model.time_shares import TimeShares
from torchtitan_lite.tools.failure_model.traces import Trace
from torchtitan_lite.tools.failure_model.whole_job import WholeJob

_HOURS_WITHOUT_FAILURES = 1000.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Time of a job by kind under a strategy."""

    strategy: Strategy
    num_ranks: int
    """Most ranks that train at the same time."""
    shares: TimeShares
    times: JobTimes
    hours: float
    """Simulated time."""
    num_steps: float
    """Steps that are kept."""


def num_reserve(scenario: Scenario, num_machines: int) -> int:
    """Return the number of reserve machines of a job."""
    if not scenario.reserve_share:
        return 0
    return max(1, round(scenario.reserve_share * num_machines))


def predict(
    scenario: Scenario, strategies: Iterable[Strategy], num_ranks: int, *, failures: int, seed: int
) -> list[Prediction]:
    """Predict a job of `num_ranks` ranks over the time in which about `failures` of its ranks fail.

    Raises UserError if the ranks do not form whole machines and replicas.
    """
    if num_ranks < 2:
        raise UserError(f"A job of {num_ranks} ranks is too small. Give at least 2 ranks.")
    per_machine = machine_ranks(scenario, num_ranks)
    per_replica = replica_ranks(scenario, num_ranks)
    if num_ranks % per_machine:
        raise UserError(
            f"{num_ranks} ranks are not a multiple of the {per_machine} ranks of a machine. Give a "
            "multiple, or set ranks_per_machine."
        )
    if per_replica % per_machine:
        raise UserError(
            f"The {per_replica} ranks of a replica are not a multiple of the {per_machine} ranks "
            "of a machine. Set ranks_per_replica."
        )
    strategies = list(strategies)
    if num_ranks % per_replica and any(strategy.replicas is not None for strategy in strategies):
        raise UserError(
            f"{num_ranks} ranks are not a multiple of the {per_replica} ranks of a replica. Give a "
            "multiple, or set ranks_per_replica."
        )
    size = num_ranks // per_machine
    total = size + num_reserve(scenario, size)
    machine_mtbf_s = scenario.mtbf_h * 3600 / per_machine
    horizon_s = failures * machine_mtbf_s / size
    if math.isinf(horizon_s):
        horizon_s = _HOURS_WITHOUT_FAILURES * 3600
    predictions = []
    for strategy in strategies:
        sources = [
            RandomFailures(
                machines,
                machine_mtbf_s=machine_mtbf_s,
                machine_share=scenario.machine_share,
                seed=f"{seed} {num_ranks} {machines.start}",
                shape=scenario.failure_shape,
            )
            for machines in (range(size), range(size, total))
        ]
        events = EventStream(failures=sources, replacement_s=scenario.replacement_s)
        times = job_times(scenario, strategy, num_ranks)
        job: WholeJob | ReplicatedJob
        if strategy.replicas is None:
            job = WholeJob(strategy, times, range(total), size)
        else:
            job = ReplicatedJob(strategy, times, range(total), size)
        shares = job.run(events, horizon_s)
        predictions.append(
            Prediction(
                strategy=strategy,
                num_ranks=num_ranks,
                shares=shares,
                times=times,
                hours=horizon_s / 3600,
                num_steps=job.num_steps,
            )
        )
    return predictions


def predict_trace(
    scenario: Scenario, strategies: Iterable[Strategy], trace: Trace
) -> list[Prediction]:
    """Predict an elastic job on the machines of a trace, each of which can hold a replica. Goodput
    is relative to the machines that are there. Intervals that are not given are the best ones for
    the losses of the trace."""
    size = trace.most_machines
    num_ranks = size * scenario.ranks_per_machine
    own = replace(
        scenario,
        ranks_per_replica=scenario.ranks_per_machine,
        mtbf_h=num_ranks * trace.duration_s / 3600 / max(1, trace.num_interruptions),
        machine_share=1.0,
    )
    predictions = []
    for strategy in strategies:
        # A job that shrinks resumes from storage, also with buddies.
        times = job_times(own, replace(strategy, buddies=False), num_ranks)
        times = replace(job_times(own, strategy, num_ranks), save_interval_s=times.save_interval_s)
        events = EventStream(trace.changes)
        job: WholeJob | ReplicatedJob
        if strategy.replicas is None:
            job = WholeJob(
                strategy,
                times,
                trace.initial,
                size,
                reserve=1 if strategy.in_place else 0,
                regrow_after_s=scenario.regrow_after_s,
            )
        else:
            job = ReplicatedJob(strategy, times, trace.initial, size, is_elastic=True)
        shares = job.run(events, trace.duration_s)
        predictions.append(
            Prediction(
                strategy=strategy,
                num_ranks=num_ranks,
                shares=shares,
                times=times,
                hours=trace.duration_s / 3600,
                num_steps=job.num_steps,
            )
        )
    return predictions


def predict_given(
    times: JobTimes, strategy: Strategy, failures: Sequence[ClusterEvents], until_s: float
) -> TimeShares:
    """Predict a job on one machine, without reserve, that meets the given failures."""
    job = WholeJob(strategy, times, [0], 1)
    return job.run(EventStream(failures), until_s)
