"""Decisions about steps, by their values and the statistics of the steps before."""

import json
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lite.config.tables.anomalies import AnomaliesConfig
from torchtitan_lite.core.errors import TrainingDiverged
from torchtitan_lite.fault_tolerance.replica.participation import Share
from torchtitan_lite.training.anomalies import AnomalyDetector, StepAction, StepStatistics
from torchtitan_lite.training.anomalies.detector import deviations_above
from torchtitan_lite.training.step.anomalous_steps import _roll_back
from torchtitan_lite.training.trainer import _end


def _detector(max_skipped_steps: int = 10, **settings: Any) -> AnomalyDetector:
    return AnomalyDetector(AnomaliesConfig.model_validate(settings), max_skipped_steps)


def _training(seed: int, steps: int) -> Iterator[tuple[float, float]]:
    """Losses and norms of a normal run: falling losses, and norms with a heavy tail."""
    noise = random.Random(seed)
    for step in range(steps):
        loss = 2.5 + 8.0 / (1 + step / 50) + noise.gauss(0, 0.05)
        yield loss, math.exp(noise.gauss(0, 0.3)) * (1 + 4 / (1 + step / 30))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 2))])
def test_a_normal_run_has_no_spikes(seed: int) -> None:
    detector, statistics = _detector(on_spike="stop"), StepStatistics()
    loss = norm = 1.0
    for step, (loss, norm) in enumerate(_training(seed, 3000), start=1):
        decision = detector.decide(loss, norm, statistics)
        assert decision.action is StepAction.COMMIT, (step, decision)
        statistics.record_commit(step, loss, norm, window=detector.window)
    assert len(statistics.losses) == detector.window
    assert detector.decide(loss + 2, norm, statistics).action is StepAction.STOP
    assert detector.decide(loss, norm * 100, statistics).action is StepAction.STOP
    # A drop is not a spike.
    assert detector.decide(loss - 2, norm / 100, statistics).action is StepAction.COMMIT


def test_spike_detection_is_optional_and_needs_a_minimum_of_steps() -> None:
    statistics = StepStatistics()
    for step in range(1, 64):
        statistics.record_commit(step, 3.0, 1.0, window=128)
    assert _detector().decide(1e6, 1e6, statistics).action is StepAction.COMMIT
    detector = _detector(on_spike="skip")
    assert detector.decide(1e6, 1e6, statistics).action is StepAction.COMMIT
    statistics.record_commit(64, 3.0, 1.0, window=128)
    assert detector.decide(1e6, 1.0, statistics).action is StepAction.SKIP


def test_noise_around_a_constant_is_not_a_spike() -> None:
    assert deviations_above(1.01, [1.0] * 9, 0.02) == pytest.approx(0.5)
    # An earlier spike in the window does not hide the next one.
    assert deviations_above(5.0, [1.0] * 8 + [9.0], 0.02) > 100


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("action", ["skip", "stop", "roll_back"])
def test_non_finite_values_are_handled_as_configured(number: float, action: str) -> None:
    detector = _detector(on_non_finite=action)
    assert detector.decide(number, 1.0, StepStatistics()).action.value == action
    assert detector.decide(1.0, number, StepStatistics()).action.value == action


def test_consecutive_skips_are_limited_and_a_commit_resets_the_count() -> None:
    detector, statistics = _detector(max_skipped_steps=3), StepStatistics()
    for _ in range(2):
        statistics.record_skip()
    assert detector.decide(math.nan, 1.0, statistics).action is StepAction.STOP
    statistics.record_commit(1, 1.0, 1.0, window=0)
    assert detector.decide(math.nan, 1.0, statistics).action is StepAction.SKIP


def test_consecutive_rollbacks_are_limited_until_the_run_progresses() -> None:
    detector, statistics = _detector(on_non_finite="roll_back", max_roll_backs=2), StepStatistics()
    statistics.record_rollback(StepStatistics(), at=10, to=8, cursor=110)
    statistics.record_commit(9, 1.0, 1.0, window=0)
    assert detector.decide(math.nan, 1.0, statistics).action is StepAction.ROLL_BACK
    statistics.record_rollback(StepStatistics(), at=9, to=7, cursor=130)
    assert detector.decide(math.nan, 1.0, statistics).action is StepAction.STOP
    for step in (8, 9, 10):
        statistics.record_commit(step, 1.0, 1.0, window=0)
        assert detector.decide(math.nan, 1.0, statistics).action is StepAction.STOP
    statistics.record_commit(11, 1.0, 1.0, window=0)
    assert detector.decide(math.nan, 1.0, statistics).action is StepAction.ROLL_BACK


def test_an_abandoned_state_is_recognized_by_step_and_cursor() -> None:
    statistics = StepStatistics()
    statistics.record_rollback(StepStatistics(), at=10, to=8, cursor=110)
    assert statistics.was_abandoned(9, 90) and statistics.was_abandoned(10, 100)
    assert not statistics.was_abandoned(8, 80)
    assert not statistics.was_abandoned(9, 120)


def test_a_rollback_restores_the_history_of_its_target() -> None:
    statistics = StepStatistics()
    statistics.record_commit(1, 3.0, 1.0, window=8)
    restored = StepStatistics.of(json.loads(json.dumps(statistics.values())))
    statistics.record_commit(2, 9.0, 9.0, window=8)
    statistics.record_rollback(restored, at=2, to=1, cursor=30)
    assert statistics.losses == [3.0] and statistics.grad_norms == [1.0]


def test_each_rollback_abandons_its_own_steps() -> None:
    statistics = StepStatistics(rollbacks=[[2, 10], [5, 40]])
    assert statistics.was_abandoned(6, 30) and statistics.was_abandoned(3, 10)
    assert not statistics.was_abandoned(5, 30) and not statistics.was_abandoned(6, 41)


def test_a_run_that_ends_leaves_no_counts_to_the_next() -> None:
    statistics = StepStatistics()
    statistics.consecutive_skips, statistics.consecutive_rollbacks = 3, 2
    statistics.reset_counts()
    assert (statistics.consecutive_skips, statistics.consecutive_rollbacks) == (0, 0)


def test_the_state_of_a_replica_that_rolls_back_is_replaced_by_healing() -> None:
    """Its snapshots belong to the abandoned history."""
    calls: list[str] = []
    checkpoints: Any = SimpleNamespace(discard_snapshots=lambda: calls.append("discarded"))
    replicas: Any = SimpleNamespace(
        after_rollback=lambda *, is_source: calls.append(f"source: {is_source}")
    )
    unused: Any = None
    event = _roll_back(unused, checkpoints, replicas, Share(index=1, count=2), min_steps=1)
    assert event.values == {"received": True} and calls == ["discarded", "source: False"]


def test_the_last_good_state_is_saved_without_counts_of_anomalies() -> None:
    statistics = StepStatistics()
    statistics.consecutive_skips = 3

    def save(*, finished: bool) -> str:
        assert statistics.consecutive_skips == 0
        return "a folder"

    job: Any = SimpleNamespace(
        replicas=SimpleNamespace(close=lambda: None),
        phases=SimpleNamespace(enter=lambda phase: None),
        state=SimpleNamespace(statistics=statistics, step=4),
        checkpoints=SimpleNamespace(final_save=save),
    )
    report: Any = SimpleNamespace(num_replicas=1)
    with pytest.raises(TrainingDiverged, match=r"step 4, saved in a folder"):
        _end(job, report, TrainingDiverged("It diverged."))
