"""The simulated step: known bubbles, and invariants of every timeline."""

from itertools import pairwise

import pytest

from tests.unit.parallel.test_step_order import plan_of
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.parallel.pipeline_order import (
    Action,
    ActionCosts,
    PipelineOrder,
    Timeline,
    simulate,
)
from torchtitan_lite.parallel.pipeline_stages import SCHEDULES, step_order


def timeline_of(schedule: str, num_ranks: int, num_microbatches: int, **costs) -> Timeline:
    plan = plan_of(schedule.lower(), num_ranks)
    return simulate(step_order(plan, schedule, num_microbatches), ActionCosts(**costs))


@pytest.mark.parametrize("costs", [{}, {"backward_input": 0.5, "backward_weight": 0.5}])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (4, 4), (4, 12), (8, 16)])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_bubble_with_one_stage_per_rank(
    schedule: str, num_ranks: int, num_microbatches: int, costs: dict[str, float]
) -> None:
    timeline = timeline_of(schedule, num_ranks, num_microbatches, **costs)
    expected = (num_ranks - 1) / (num_microbatches + num_ranks - 1)
    assert timeline.bubble_fraction == pytest.approx(expected)


def test_better_schedules_have_smaller_bubbles() -> None:
    names = ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
    bubbles = [timeline_of(name, 4, 8).bubble_fraction for name in names]
    assert bubbles == sorted(bubbles, reverse=True)
    assert len(set(bubbles)) == len(bubbles)


def test_the_complete_timeline_of_a_small_step() -> None:
    timeline = timeline_of("1F1B", 2, 2)
    shown = [[(str(s.action), s.start, s.end) for s in row] for row in timeline.rows]
    assert shown == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9)],
        [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7)],
    ]
    assert timeline.makespan == 9
    assert timeline.bubble_fraction == pytest.approx(1 / 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_invariants_of_every_timeline(schedule: str) -> None:
    plan = plan_of(schedule, 4)
    order = step_order(plan, schedule, 8)
    last = order.num_stages - 1
    weights = tuple(1 + stage % 3 for stage in range(order.num_stages))
    costs = ActionCosts(forward=1, backward_input=1.25, backward_weight=0.5, stage_weights=weights)
    timeline = simulate(order, costs)
    assert tuple(tuple(span.action for span in row) for row in timeline.rows) == order.rows
    ends: dict[tuple[str, int, int], float] = {}
    for row in timeline.rows:
        for span in row:
            action = span.action
            assert span.end - span.start == pytest.approx(costs.of(action))
            way = "I" if action.kind == "B" else action.kind
            ends[way, action.stage, action.microbatch] = span.end
        for before, after in pairwise(row):
            assert before.end <= after.start
    for span in (span for row in timeline.rows for span in row):
        kind, stage, microbatch = span.action.kind, span.action.stage, span.action.microbatch
        if kind == "F" and stage > 0:
            assert ends["F", stage - 1, microbatch] <= span.start
        if kind in "BI":
            assert ends["F", stage, microbatch] <= span.start
            assert stage == last or ends["I", stage + 1, microbatch] <= span.start
        if kind == "W":
            assert ends["I", stage, microbatch] <= span.start


def test_a_deadlock_is_reported() -> None:
    order = PipelineOrder(
        (
            (Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)),
            (Action(1, "F", 0), Action(1, "F", 1), Action(1, "B", 0), Action(1, "B", 1)),
        )
    )
    with pytest.raises(
        MeshError, match="rank 0 stops before 0B0, because it needs the backward of"
    ):
        simulate(order, ActionCosts())
