"""Intervals of saves, snapshots and copies to buddies."""

from dataclasses import replace

import pytest

from torchtitan_lite.tools.failure_model import STRATEGIES, JobTimes, Scenario, job_times, predict

BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}
NUM_RANKS = 100_000


def times_of(strategy: str, **changes: float) -> JobTimes:
    return job_times(replace(Scenario(), **changes), BY_NAME[strategy], NUM_RANKS)


def test_snapshots_are_as_far_apart_as_copies_that_take_a_little_longer() -> None:
    # Young's interval of 48 s has no room for a copy of 49.2 s; every second one would be copied.
    times = times_of("buddies", buddy_mib_per_s=250.0)
    assert times.buddy_copy_s == pytest.approx(49.152)
    assert times.snapshot_interval_s == times.buddy_interval_s == 54
    times = times_of("buddies", buddy_mib_per_s=256.0)
    assert times.buddy_copy_s == times.snapshot_interval_s == times.buddy_interval_s == 48
    # Snapshots are no further apart where copies are much faster.
    assert times_of("buddies", buddy_mib_per_s=4000.0).snapshot_interval_s == 48


def test_a_job_saves_as_one_without_buddies_where_copies_are_slow() -> None:
    slow, without = times_of("buddies", buddy_mib_per_s=50.0), times_of("spares")
    assert slow.save_interval_s == without.save_interval_s == 96
    assert slow.snapshot_interval_s == without.snapshot_interval_s
    assert times_of("buddies").save_interval_s == 3600


def test_given_intervals_are_kept() -> None:
    given = {"save_interval_steps": 50, "snapshot_interval_steps": 3, "buddy_interval_steps": 20}
    for rate in (10.0, 4000.0):
        times = times_of("buddies", buddy_mib_per_s=rate, **given)
        assert (times.save_interval_s, times.snapshot_interval_s) == (300, 18)
    assert times.buddy_interval_s == 126


@pytest.mark.parametrize(
    "mib_per_s", [pytest.param(20.0, marks=pytest.mark.matrix), 250.0, 256.0, 1000.0]
)
def test_buddies_are_never_worse_than_spares(mib_per_s: float) -> None:
    scenario = replace(Scenario(), buddy_mib_per_s=mib_per_s)
    both = [BY_NAME["spares"], BY_NAME["buddies"]]
    spares, buddies = predict(scenario, both, NUM_RANKS, failures=500, seed=0)
    # Both have the same failures; equal intervals give equal results.
    assert buddies.shares.goodput >= spares.shares.goodput - 1e-3
