"""Goodput under failures, against closed forms."""

import math

import pytest

from torchtitan_lite.estimate.failures import FailureModel, simulate

NUM_FAILURES = 50_000
"""The standard error of a mean of exponential times is 0.5 %."""


def _simulate(model: FailureModel, num_failures: int = NUM_FAILURES) -> float:
    return simulate(model, num_failures * model.rank_mtbf_s / model.num_ranks).goodput


def _daly(mtbf_s: float, interval_s: float, save_s: float, recovery_s: float) -> float:
    """Return the goodput of restarts from storage. The expected time of an interval with its save
    is that of J. T. Daly, A higher order estimate of the optimum checkpoint interval, 2006."""
    cycle_s = interval_s + save_s
    time_s = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1(cycle_s / mtbf_s)
    return interval_s / time_s


@pytest.mark.parametrize("num_ranks", [8, 1000])
@pytest.mark.parametrize("interval_s", [60.0, 600.0])
@pytest.mark.parametrize("save_s", [0.0, 30.0])
def test_restarts_agree_with_daly(num_ranks: int, interval_s: float, save_s: float) -> None:
    model = FailureModel(
        num_ranks=num_ranks,
        rank_mtbf_s=1000.0 * num_ranks,
        detect_s=5,
        restart_s=15,
        load_s=80,
        save_s=save_s,
        save_interval_s=interval_s,
    )
    assert _simulate(model) == pytest.approx(_daly(1000, interval_s, save_s, 100), rel=0.02)


def test_the_best_interval_is_that_of_young() -> None:
    def goodput(interval_s: float) -> float:
        model = FailureModel(
            num_ranks=10, rank_mtbf_s=36000, save_s=5, save_interval_s=interval_s, load_s=20
        )
        return _simulate(model)

    best_s = math.sqrt(2 * 5 * 3600)
    assert goodput(best_s) > max(goodput(best_s / 3), goodput(3 * best_s))


@pytest.mark.parametrize("num_replicas", [4, 100])
def test_replicas_without_pauses_have_the_availability_of_one(num_replicas: int) -> None:
    model = FailureModel(
        num_ranks=8 * num_replicas,
        rank_mtbf_s=80_000,
        strategy="replicas",
        num_replicas=num_replicas,
        detect_s=0,
        heal_s=0,
        restart_s=1000,
        load_s=0,
        # So that nothing is lost when all replicas are down.
        save_interval_s=1e-6,
    )
    assert _simulate(model) == pytest.approx(10_000 / 11_000, rel=0.01)


def test_pauses_stop_all_replicas() -> None:
    model = FailureModel(
        num_ranks=1000,
        rank_mtbf_s=1e6,
        strategy="replicas",
        num_replicas=1000,
        detect_s=100,
        heal_s=0,
        restart_s=0,
    )
    # Failures at rate 1/1000 s each stop everything for 100 s: it works when the last 100 s had
    # none.
    assert _simulate(model) == pytest.approx(math.exp(-0.1), rel=0.02)


def test_spares_shorten_the_absence() -> None:
    def goodput(num_spares: int) -> float:
        model = FailureModel(
            num_ranks=100,
            rank_mtbf_s=1e5,
            num_spares=num_spares,
            repair_s=2000,
            detect_s=0,
            restart_s=500,
            replace_s=10,
            load_s=0,
            save_interval_s=1,
        )
        return _simulate(model)

    without, few, many = goodput(0), goodput(1), goodput(50)
    assert without < few < many
    assert many == pytest.approx(_daly(1000, 1, 0, 10), rel=0.01)


def test_buddies_agree_with_daly_for_short_intervals() -> None:
    model = FailureModel(
        num_ranks=10_000,
        rank_mtbf_s=1e7,
        strategy="buddies",
        detect_s=5,
        restart_s=15,
        buddy_interval_s=30,
        buddy_s=0.5,
        save_interval_s=600,
        load_s=100,
    )
    assert _simulate(model) == pytest.approx(_daly(1000, 30, 0.5, 20), rel=0.02)


def test_two_ranks_are_each_others_buddies() -> None:
    model = FailureModel(
        num_ranks=2,
        rank_mtbf_s=100,
        strategy="buddies",
        detect_s=0,
        restart_s=0,
        load_s=0,
        buddy_interval_s=100,
        save_interval_s=1000,
    )
    found = simulate(model, 1e6)
    # Many failures hit both within an interval, so that work since the last save is lost.
    assert found.lost_work_s > found.num_failures * 20
    assert 0 <= found.goodput < _daly(50, 100, 0, 0)


def test_equal_seeds_give_equal_runs() -> None:
    model = FailureModel(num_ranks=8, rank_mtbf_s=1e4, strategy="replicas", num_replicas=2)
    assert simulate(model, 1e6, seed=3) == simulate(model, 1e6, seed=3)
    assert simulate(model, 1e6, seed=3) != simulate(model, 1e6, seed=4)


@pytest.mark.parametrize(
    "wrong", [{"num_ranks": 9, "num_replicas": 2}, {"num_ranks": 0}, {"rank_mtbf_s": 0}]
)
def test_invalid_models(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        FailureModel(**{"num_ranks": 8, "rank_mtbf_s": 1.0, **wrong})
