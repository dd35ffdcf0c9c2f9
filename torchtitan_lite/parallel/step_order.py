"""The order of a step: that of the plan's file, else that of torch's schedule.

Layer: above errors, torch_compat; `order`, `stages`.
"""

from typing import cast

from torchtitan_lite.errors import MeshError
from torchtitan_lite.parallel.order import Action, Kind, PipelineOrder
from torchtitan_lite.parallel.stages import StagePlan
from torchtitan_lite.torch_compat import schedule_actions


def step_order(plan: StagePlan, schedule: str, num_microbatches: int) -> PipelineOrder:
    """The order in which a pipeline of `plan` runs a step. Raises MeshError when the schedule does
    not take that many microbatches."""
    if plan.order is not None:
        return plan.order
    num_ranks, num_stages = max(plan.ranks) + 1, len(plan.ranks)
    if schedule.lower() == "1f1b":
        return _one_forward_one_backward(num_ranks, num_microbatches)
    try:
        rows = schedule_actions(schedule, num_ranks, num_stages, num_microbatches)
    except ValueError as error:
        raise refused_microbatches(schedule, num_microbatches, num_stages, error) from None
    return PipelineOrder(
        tuple(
            tuple(Action(stage, cast(Kind, kind), microbatch) for stage, kind, microbatch in row)
            for row in rows
        )
    )


def refused_microbatches(
    schedule: str, num_microbatches: int, num_stages: int, error: ValueError
) -> MeshError:
    """What to raise when a schedule refuses its number of microbatches."""
    return MeshError(
        f"The schedule {schedule} cannot run {num_microbatches} microbatches through {num_stages} "
        f"stages: {str(error).rstrip('.')}. Change training.global_batch_size or "
        "pipeline_parallel_microbatch_size."
    )


def _one_forward_one_backward(num_ranks: int, num_microbatches: int) -> PipelineOrder:
    """As torch's 1F1B runs. The order that its class shows (torch 2.13) counts the forwards of the
    last rank from 1, and is not what it runs."""
    rows = []
    for rank in range(num_ranks):
        ahead = min(num_microbatches, num_ranks - rank)
        row = [Action(rank, "F", microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            row.append(Action(rank, "B", microbatch))
            if ahead + microbatch < num_microbatches:
                row.append(Action(rank, "F", ahead + microbatch))
        rows.append(tuple(row))
    return PipelineOrder(tuple(rows))
