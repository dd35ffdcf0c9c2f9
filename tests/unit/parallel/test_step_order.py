"""The order of a step, derived from torch's schedules without a process group."""

from itertools import product

import pytest
import torch.distributed as dist

from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.distributed.torch_compat import schedule_actions
from torchtitan_lite.parallel.pipeline_order import (
    Action,
    ActionCosts,
    PipelineOrder,
    forward_only,
    simulate,
)
from torchtitan_lite.parallel.pipeline_stages import SCHEDULES, StagePlan, step_order


def plan_of(schedule: str, num_ranks: int) -> StagePlan:
    """Return a plan with as many stages as the schedule needs, without modules."""
    once = list(range(num_ranks))
    ranks = {
        "1f1b": once,
        "gpipe": once,
        "zbvzerobubble": once + once[::-1],
        "dualpipev": once + once[::-1],
    }.get(schedule, once * 2)
    return StagePlan(modules=((),) * len(ranks), ranks=tuple(ranks))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_microbatch_passes_each_stage_once_in_each_direction(
    schedule: str, num_ranks: int
) -> None:
    plan = plan_of(schedule, num_ranks)
    order = step_order(plan, schedule, 8)
    assert not dist.is_initialized()
    assert order.ranks == plan.ranks
    assert order.num_microbatches == 8
    actions = [action for row in order.rows for action in row]
    assert len(set(actions)) == len(actions)
    for stage, microbatch in product(range(len(plan.ranks)), range(8)):
        kinds = {a.kind for a in actions if (a.stage, a.microbatch) == (stage, microbatch)}
        assert kinds in ({"F", "B"}, {"F", "I", "W"})


def test_1f1b_equals_torchs_except_on_the_last_rank() -> None:
    """torch 2.13 displays forwards of microbatches 1 to 8 there, but runs 0 to 7."""
    ours = step_order(plan_of("1f1b", 4), "1F1B", 8)
    shown = schedule_actions("1F1B", 4, 4, 8)
    assert [[(a.stage, a.kind, a.microbatch) for a in row] for row in ours.rows[:-1]] == shown[:-1]
    assert [f"{s}{kind}{m - (kind == 'F')}" for s, kind, m in shown[-1]] == ours.cells()[-1]


def test_a_number_of_microbatches_that_the_schedule_rejects() -> None:
    with pytest.raises(MeshError, match="The schedule DualPipeV cannot run 3 microbatches through"):
        step_order(plan_of("dualpipev", 2), "DualPipeV", 3)


def test_the_order_of_a_file_takes_precedence() -> None:
    order = PipelineOrder(((Action(0, "F", 0), Action(0, "B", 0)),))
    plan = StagePlan(modules=((),), ranks=(0,), order=order)
    assert step_order(plan, "1F1B", 8) is order


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (1, 0, 0)])
def test_forward_only_completes_on_any_split(ranks: tuple[int, ...]) -> None:
    order = forward_only(ranks, 3)
    assert (order.ranks, len(order.rows)) == (ranks, max(ranks) + 1)
    assert sum(len(row) for row in simulate(order, ActionCosts()).rows) == 3 * len(ranks)
