"""What is done with a step, by its numbers and those before it."""

import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from torchtitan_lite.anomalies import Action, History, Judge
from torchtitan_lite.anomalies.spikes import deviations_above
from torchtitan_lite.schema.anomalies import AnomaliesConfig


def _judge(max_skipped_steps: int = 10, **settings: Any) -> Judge:
    return Judge(AnomaliesConfig.model_validate(settings), max_skipped_steps)


def _training(seed: int, steps: int) -> Iterator[tuple[float, float]]:
    """Losses and norms as of a run that goes well: falling, and the norms with a heavy tail."""
    noise = random.Random(seed)
    for step in range(steps):
        loss = 2.5 + 8.0 / (1 + step / 50) + noise.gauss(0, 0.05)
        yield loss, math.exp(noise.gauss(0, 0.3)) * (1 + 4 / (1 + step / 30))


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_goes_well_has_no_spikes(seed: int) -> None:
    judge, history = _judge(on_spike="stop"), History()
    loss = norm = 1.0
    for step, (loss, norm) in enumerate(_training(seed, 3000), start=1):
        verdict = judge.judge(loss, norm, history)
        assert verdict.action is Action.COMMIT, (step, verdict)
        history.committed(step, loss, norm, window=judge.window)
    assert len(history.losses) == judge.window
    assert judge.judge(loss + 2, norm, history).action is Action.STOP
    assert judge.judge(loss, norm * 100, history).action is Action.STOP
    # What falls is no spike.
    assert judge.judge(loss - 2, norm / 100, history).action is Action.COMMIT


def test_spikes_are_off_unless_asked_for_and_need_steps_to_compare_with() -> None:
    history = History()
    for step in range(1, 64):
        history.committed(step, 3.0, 1.0, window=128)
    assert _judge().judge(1e6, 1e6, history).action is Action.COMMIT
    judge = _judge(on_spike="skip")
    assert judge.judge(1e6, 1e6, history).action is Action.COMMIT
    history.committed(64, 3.0, 1.0, window=128)
    assert judge.judge(1e6, 1.0, history).action is Action.SKIP


def test_what_hardly_changes_makes_no_spike_of_noise() -> None:
    assert deviations_above(1.01, [1.0] * 9, 0.02) == pytest.approx(0.5)
    # One in the window that has spiked does not hide the next.
    assert deviations_above(5.0, [1.0] * 8 + [9.0], 0.02) > 100


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("action", ["skip", "stop", "roll_back"])
def test_what_is_not_finite_is_handled_as_configured(number: float, action: str) -> None:
    judge = _judge(on_non_finite=action)
    assert judge.judge(number, 1.0, History()).action.value == action
    assert judge.judge(1.0, number, History()).action.value == action


def test_refusals_in_a_row_have_a_limit_and_a_commit_ends_the_row() -> None:
    judge, history = _judge(max_skipped_steps=3), History()
    for _ in range(2):
        history.refused()
    assert judge.judge(math.nan, 1.0, history).action is Action.STOP
    history.committed(1, 1.0, 1.0, window=0)
    assert judge.judge(math.nan, 1.0, history).action is Action.SKIP


def test_roll_backs_in_a_row_have_a_limit_until_the_run_comes_further() -> None:
    judge, history = _judge(on_non_finite="roll_back", max_roll_backs=2), History()
    history.rolled_back(History(), at=10, to=8, cursor=110)
    history.committed(9, 1.0, 1.0, window=0)
    assert judge.judge(math.nan, 1.0, history).action is Action.ROLL_BACK
    history.rolled_back(History(), at=9, to=7, cursor=130)
    assert judge.judge(math.nan, 1.0, history).action is Action.STOP
    for step in (8, 9, 10):
        history.committed(step, 1.0, 1.0, window=0)
        assert judge.judge(math.nan, 1.0, history).action is Action.STOP
    history.committed(11, 1.0, 1.0, window=0)
    assert judge.judge(math.nan, 1.0, history).action is Action.ROLL_BACK


def test_a_state_on_a_way_that_was_left_is_known_by_step_and_samples() -> None:
    history = History()
    history.rolled_back(History(), at=10, to=8, cursor=110)
    assert history.has_left_behind(9, 90) and history.has_left_behind(10, 100)
    assert not history.has_left_behind(8, 80)
    assert not history.has_left_behind(9, 120)


def test_a_roll_back_compares_with_the_steps_before_those_taken_back() -> None:
    history = History()
    history.committed(1, 3.0, 1.0, window=8)
    earlier = History.of(json.loads(json.dumps(history.values())))
    history.committed(2, 9.0, 9.0, window=8)
    history.rolled_back(earlier, at=2, to=1, cursor=30)
    assert history.losses == [3.0] and history.grad_norms == [1.0]
