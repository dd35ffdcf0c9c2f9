"""Ranks that are slow are named, and noise is not taken for them."""

import numpy as np
import pytest

from torchtitan_lite.training.anomalies import slow_ranks
from torchtitan_lite.training.anomalies.slow_ranks import (
    RankWork,
    SlowRank,
    SlowRankDetector,
    median_of_others,
)


def _times(seed: int, steps: int, ranks: int, jitter: float = 0.1) -> np.ndarray:
    """[steps, ranks] as of a run without slow ranks: each step and rank with its noise, steps that
    are long for all (a checkpoint, another job), and single ranks that stop for a moment."""
    noise = np.random.default_rng(seed)
    times = 0.2 * np.exp(noise.normal(0, jitter, (steps, ranks)))
    times *= np.where(noise.random((steps, 1)) < 0.02, noise.uniform(1.5, 5, (steps, 1)), 1)
    times[noise.random((steps, ranks)) < 0.01] *= 8
    # For some steps in a row somebody else uses a rank's machine.
    for start in range(100, steps, 500):
        times[start : start + 20, noise.integers(ranks)] *= 2
    return times


def _found(times: np.ndarray, stages: int = 1, microbatches: int = 2) -> list[tuple[int, SlowRank]]:
    detector, found = SlowRankDetector(), []
    ranks = times.shape[1]
    for step, row in enumerate(times.tolist()):
        work = [
            RankWork(rank // 2, rank % 2, rank * stages // ranks, microbatches, seconds)
            for rank, seconds in enumerate(row)
        ]
        found += [(step, change) for change in detector.step(work)]
    return found


def test_the_median_of_others() -> None:
    for ranks in (2, 3, 4, 7, 8):
        times = np.random.default_rng(ranks).random(ranks)
        times[: ranks // 2] = 0.5
        found = median_of_others(times)
        for rank in range(ranks):
            assert found[rank] == pytest.approx(np.median(np.delete(times, rank)))


@pytest.mark.parametrize(
    ("ranks", "jitter", "seeds"), [(2, 0.1, 3), (2, 0.3, 3), (4, 0.3, 2), (8, 0.1, 2), (64, 0.2, 1)]
)
@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=pytest.mark.matrix)])
def test_noise_names_nobody(ranks: int, jitter: float, seeds: int, steps: int) -> None:
    for seed in range(seeds):
        assert _found(_times(seed, steps, ranks, jitter)) == []


@pytest.mark.parametrize(
    ("ranks", "jitter", "within"),
    [
        (2, 0.03, 80),
        (2, 0.1, 280),
        (8, 0.1, 280),
        pytest.param(64, 0.1, 280, marks=pytest.mark.matrix),
    ],
)
def test_a_rank_that_is_slower_by_a_third_is_named_once_until_it_ends(
    ranks: int, jitter: float, within: int
) -> None:
    for seed in range(3):
        times = _times(seed, 2000, ranks, jitter)
        times[300:1200, 1] *= 1.3
        (began, slow), (ended, over) = _found(times)
        assert (slow.replica, slow.rank, slow.is_slow) == (0, 1, True)
        assert 300 < began <= 300 + within and slow.times_slower == pytest.approx(1.3, abs=0.1)
        assert (over.replica, over.rank, over.is_slow) == (0, 1, False)
        assert 1200 < ended <= 1200 + 80


def test_stages_and_shares_of_the_work_are_not_compared() -> None:
    times = _times(0, 500, 4)
    times[:, 2:] *= 3
    assert _found(times, stages=2) == []
    detector = SlowRankDetector()
    for row in times.tolist():
        work = [RankWork(0, rank, 0, 1 + rank // 2, seconds) for rank, seconds in enumerate(row)]
        assert detector.step(work) == []


def test_a_change_of_who_takes_part_begins_anew() -> None:
    detector = SlowRankDetector()
    named = []
    for step in range(400):
        # From step 150 on replica 2 has the place of replica 1.
        other = 1 if step < 150 else 2
        slow = 1.5 if other == 1 else 1.0
        work = [RankWork(0, 0, 0, 2, 0.2), RankWork(other, 0, 0, 2, 0.2 * slow)]
        named += detector.step(work)
    assert [(one.replica, one.is_slow) for one in named] == [(1, True)]


def test_a_step_that_one_rank_has_not_measured_is_not_counted() -> None:
    detector = SlowRankDetector()
    work = [
        RankWork(replica=0, rank=rank, stage=0, microbatches=1, seconds=seconds, data_s=0.0)
        for rank, seconds in enumerate((1.0, 0.0, 1.0))
    ]
    assert detector.step(work) == [] and not detector._sum.any() and not detector._rows


def test_a_rank_alone_in_its_stage_has_nobody_to_compare_with() -> None:
    detector = SlowRankDetector()
    for step in range(100):
        others = [RankWork(0, rank, 0, 2, 0.2) for rank in (0, 1)]
        assert detector.step([*others, RankWork(0, 2, 1, 2, 0.5 + step)]) == []


@pytest.mark.parametrize(
    ("slower", "changes"),
    [
        # Beyond 1.10 times a rank is slow, below 1.05 it no longer is.
        ([slow_ranks._SLOW], []),
        ([slow_ranks._SLOW + 1e-9], [True]),
        ([0.2, slow_ranks._NOT_SLOW], [True]),
        ([0.2, slow_ranks._NOT_SLOW - 1e-9], [True, False]),
    ],
)
def test_at_a_limit_nothing_changes(slower: list[float], changes: list[bool]) -> None:
    detector = SlowRankDetector()
    detector.step([RankWork(0, rank, 0, 1, 0.2) for rank in (0, 1)])
    found = [one for by in slower for one in detector._changes(np.tile([by, 0.0], (64, 1)))]
    assert [(one.rank, one.is_slow) for one in found] == [(0, is_slow) for is_slow in changes]


@pytest.mark.parametrize(("data_s", "waits"), [(0.1, False), (0.11, True), (0.2, True)])
def test_a_rank_waits_for_data_if_that_is_most_of_the_difference(
    data_s: float, waits: bool
) -> None:
    detector = SlowRankDetector()
    work = [RankWork(0, 0, 0, 1, 0.4, data_s), RankWork(0, 1, 0, 1, 0.2)]
    found = [one for _ in range(64) for one in detector.step(work)]
    assert [(one.rank, one.times_slower, one.waits_for_data) for one in found] == [(0, 2, waits)]


@pytest.mark.parametrize("waits_first", [True, False])
def test_another_cause_of_a_slow_rank_is_reported(waits_first: bool) -> None:
    detector, found = SlowRankDetector(), []

    def observe(steps: int, slow_s: float, data_s: float) -> None:
        work = [RankWork(0, 0, 0, 1, slow_s, data_s), RankWork(0, 1, 0, 1, 0.2)]
        for _ in range(steps):
            found.extend(detector.step(work))

    causes = [(waits, 0.2 * waits) for waits in (waits_first, not waits_first)]
    observe(96, 0.4, causes[0][1])
    # Too short to be over.
    observe(24, 0.2, 0.0)
    observe(160, 0.4, causes[1][1])
    assert [(one.is_slow, one.waits_for_data) for one in found] == [
        (True, waits) for waits, _ in causes
    ]
    observe(160, 0.2, 0.0)
    assert [(one.is_slow, one.waits_for_data) for one in found[2:]] == [(False, False)]


def test_a_cause_that_is_mixed_is_not_reported_again() -> None:
    detector, found = SlowRankDetector(), []
    for data_s in (0.2, 0.06, 0.15, 0.08):
        work = [RankWork(0, 0, 0, 1, 0.4, data_s), RankWork(0, 1, 0, 1, 0.2)]
        for _ in range(96):
            found.extend(detector.step(work))
    assert [(one.is_slow, one.waits_for_data) for one in found] == [(True, True)]
