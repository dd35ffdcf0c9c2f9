"""The simulations agree with what can be computed by hand."""

import math
from dataclasses import replace

import pytest

from torchtitan_lite.tools.failure_model import (
    STRATEGIES,
    ClusterEvents,
    JobTimes,
    Scenario,
    Strategy,
    TimeShares,
    job_times,
    predict,
    predict_given,
)
from torchtitan_lite.tools.failure_model.events import EventStream, RandomFailures
from torchtitan_lite.tools.failure_model.replicated_job import ReplicatedJob
from torchtitan_lite.tools.failure_model.whole_job import WholeJob

BY_NAME = {one.name: one for one in STRATEGIES}
PLAIN = JobTimes(
    num_ranks=8,
    machines_per_replica=1,
    step_s=1.0,
    exchange_s=0.0,
    save_interval_s=100.0,
    save_stall_s=5.0,
    write_s=5.0,
    load_s=0.0,
    snapshot_interval_s=1.0,
    snapshot_stall_s=0.0,
    snapshot_load_s=0.0,
    buddy_interval_s=10.0,
    buddy_copy_s=2.0,
    transfer_s=0.0,
    restart_s=20.0,
    spare_s=2.0,
    machine_loss_s=0.0,
    replica_stall_s=0.0,
    replica_restart_s=30.0,
    donor_stall_s=0.0,
)
"""Without any time that a test does not set."""


def random_failures(machines: int, machine_mtbf_s: float, machine_share: float) -> EventStream:
    source = RandomFailures(
        range(machines), machine_mtbf_s=machine_mtbf_s, machine_share=machine_share, seed="a"
    )
    return EventStream(failures=[source])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
def test_without_failures_only_saves_and_snapshots_cost_time(strategy: Strategy) -> None:
    scenario = Scenario(mtbf_h=math.inf, snapshot_interval_steps=4, save_interval_steps=60)
    (found,) = predict(scenario, [strategy], 64, failures=1, seed=0)
    times = found.times
    steps_s = times.save_interval_s
    snapshots_s = steps_s / times.snapshot_interval_s * times.snapshot_stall_s
    expected = steps_s / (steps_s + snapshots_s + times.save_stall_s)
    assert steps_s == 360 and (snapshots_s > 0) == strategy.snapshots
    # The end of the simulated time cuts one interval of about 10,000.
    assert found.shares.goodput == pytest.approx(expected, rel=1e-5)
    assert found.shares.lost == found.shares.recovering == found.shares.waiting == 0


@pytest.mark.parametrize(
    ("mtbf_s", "interval_s", "save_s", "restart_s"),
    [
        (300.0, 50.0, 10.0, 60.0),
        pytest.param(2000.0, 100.0, 5.0, 20.0, marks=pytest.mark.matrix),
        pytest.param(100.0, 100.0, 1.0, 50.0, marks=pytest.mark.matrix),
    ],
)
def test_restart_from_storage_agrees_with_daly(
    mtbf_s: float, interval_s: float, save_s: float, restart_s: float
) -> None:
    """Daly (2006), equation for exponential failures, which may interrupt a restart too."""
    times = replace(
        PLAIN,
        save_interval_s=interval_s,
        save_stall_s=save_s,
        write_s=save_s,
        restart_s=restart_s,
    )
    job = WholeJob(BY_NAME["restart"], times, range(4), 4)
    shares = job.run(random_failures(4, 4 * mtbf_s, 0.0), 40_000 * mtbf_s)
    segment_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)
    assert shares.goodput == pytest.approx(interval_s / segment_s, rel=0.01)


def upper_gamma(shape: int, x: float) -> float:
    """The regularized upper incomplete gamma function of a whole number."""
    return math.exp(-x) * sum(x**order / math.factorial(order) for order in range(shape))


@pytest.mark.parametrize(
    "shape", [4, math.inf, *(pytest.param(shape, marks=pytest.mark.matrix) for shape in (1, 48))]
)
def test_recoveries_agree_with_renewal_theory_for_any_regularity(shape: float) -> None:
    """Between failures X apart a job with recoveries of R trains for max(0, X - R), with a gamma
    distribution of X. Only the failure itself costs: each step is in shared memory at once."""
    mtbf_s, recovery_s = 300.0, 240.0
    if math.isinf(shape):
        expected = 1 - recovery_s / mtbf_s
    else:
        x = recovery_s / mtbf_s * shape
        expected = upper_gamma(int(shape) + 1, x)
        expected -= recovery_s / mtbf_s * upper_gamma(int(shape), x)
    times = replace(
        PLAIN, spare_s=recovery_s, snapshot_interval_s=1e-3, save_stall_s=0.0, save_interval_s=1e9
    )
    failures = RandomFailures(
        range(4), machine_mtbf_s=4 * mtbf_s, machine_share=0.0, seed="c", shape=shape
    )
    job = WholeJob(BY_NAME["spares"], times, range(4), 4)
    shares = job.run(EventStream(failures=[failures]), 8000 * mtbf_s)
    assert shares.goodput == pytest.approx(expected, rel=0.03)


def test_an_exchange_between_replicas_slows_each_step_while_there_are_several() -> None:
    times = replace(PLAIN, exchange_s=1.0, save_stall_s=0.0)
    died = EventStream([ClusterEvents(at_s=40.0, rank_lost=frozenset({1}))])
    job = ReplicatedJob(BY_NAME["torchft"], times, range(2), 2)
    shares = job.run(died, 100.0)
    # 20 steps of 2 s, 30 steps of one replica alone while the other starts, and 15 of both.
    assert job.num_steps == pytest.approx(20 + 30 + 15)
    assert shares.exchanging == pytest.approx(2 * 20 + 2 * 15)
    assert shares.useful == pytest.approx(2 * 20 + 30 + 2 * 15)


def test_replicas_of_this_project_compute_the_samples_of_a_missing_one() -> None:
    died = EventStream([ClusterEvents(at_s=40.0, rank_lost=frozenset({1}))])
    job = ReplicatedJob(BY_NAME["replicas"], replace(PLAIN, save_stall_s=0.0), range(2), 2)
    job.run(died, 100.0)
    # One replica needs 2 s for each of the steps of the 30 s.
    assert job.num_steps == pytest.approx(40 + 15 + 30)


@pytest.mark.parametrize(("lost_rank", "more_s"), [(True, 0.0), (False, 7.0)])
def test_a_lost_machine_takes_longer_to_replace_than_a_dead_rank(
    lost_rank: bool, more_s: float
) -> None:
    times = replace(PLAIN, machine_loss_s=7.0)
    machines = frozenset({1})
    event = ClusterEvents(
        at_s=50.0,
        rank_lost=machines if lost_rank else frozenset(),
        lost=frozenset() if lost_rank else machines,
    )
    whole = WholeJob(BY_NAME["spares"], times, range(6), 4)
    assert whole.run(EventStream([event]), 90.0).recovering == pytest.approx(4 * (2 + more_s))
    replicated = ReplicatedJob(BY_NAME["replicas"], times, range(6), 4)
    shares = replicated.run(EventStream([event]), 90.0)
    assert shares.recovering == pytest.approx(30 + 3 * more_s)


def test_the_steps_of_a_job_without_replicas_are_those_that_are_kept() -> None:
    job = WholeJob(BY_NAME["restart"], PLAIN, [0], 1)
    job.run(EventStream([rank(150.0)]), 200.0)
    assert job.num_steps == pytest.approx(100 + 30)


def test_the_default_interval_of_saves_is_youngs() -> None:
    scenario = Scenario(step_s=1.0, storage_gib_per_s=1e9)
    times = job_times(scenario, BY_NAME["restart"], 16384)
    mtbf_s = scenario.mtbf_h * 3600 / 16384
    assert times.save_interval_s == math.ceil(math.sqrt(2 * times.save_stall_s * mtbf_s))
    # No other interval is better by more than the noise.
    best = predict(scenario, [BY_NAME["restart"]], 16384, failures=2000, seed=0)[0].shares.goodput
    for factor in (0.5, 2.0):
        steps = round(times.save_interval_s * factor)
        other = replace(scenario, save_interval_steps=steps)
        (found,) = predict(other, [BY_NAME["restart"]], 16384, failures=2000, seed=0)
        assert found.shares.goodput < best


def test_replicas_that_fail_alone_have_the_availability_of_renewal_theory() -> None:
    """A replica is up for M on average and down for M (exp(D / M) - 1), because a failure during
    its start begins it again; so it is up for exp(-D / M) of the time."""
    times = replace(PLAIN, step_s=1e-6, save_stall_s=0.0, replica_restart_s=50.0)
    job = ReplicatedJob(BY_NAME["replicas"], times, range(64), 64)
    shares = job.run(random_failures(64, 400.0, 0.0), 100_000.0)
    assert shares.goodput == pytest.approx(math.exp(-50 / 400), rel=0.01)


@pytest.mark.matrix
def test_waiting_for_machines_is_the_tail_of_a_binomial_distribution() -> None:
    """Each machine is out for D of M + D on average, so that the number of machines that are out
    is binomial; the job waits while it is above the reserve."""
    mtbf_s, out_s, size, reserve = 1000.0, 50.0, 20, 2
    times = replace(PLAIN, restart_s=0.0, save_stall_s=0.0, write_s=0.0)
    sources = [
        RandomFailures(range(size + reserve), machine_mtbf_s=mtbf_s, machine_share=1.0, seed="b")
    ]
    events = EventStream(failures=sources, replacement_s=out_s)
    job = WholeJob(BY_NAME["restart"], times, range(size + reserve), size)
    shares = job.run(events, 2_000_000.0)
    out = out_s / (mtbf_s + out_s)
    total = size + reserve
    enough = sum(
        math.comb(total, count) * out**count * (1 - out) ** (total - count)
        for count in range(reserve + 1)
    )
    assert shares.shares()["waiting"] == pytest.approx(1 - enough, rel=0.03)


def given(strategy: str, *events: ClusterEvents, until_s: float) -> TimeShares:
    return predict_given(PLAIN, BY_NAME[strategy], events, until_s)


def rank(at_s: float) -> ClusterEvents:
    return ClusterEvents(at_s=at_s, rank_lost=frozenset({0}))


def test_a_restart_repeats_everything_since_the_last_durable_save() -> None:
    # Saved at 100, durable at 105; 45 s of work are lost at 150 and 20 s of restart follow.
    shares = given("restart", rank(150.0), until_s=200.0)
    assert shares == TimeShares(useful=100 + 30, lost=45, saving=5, recovering=20)
    # The save that a failure interrupts is not durable.
    shares = given("restart", rank(104.0), until_s=124.0)
    assert shares == TimeShares(useful=0, lost=100, saving=4, recovering=20)
    # A failure during the restart begins it again.
    shares = given("restart", rank(150.0), rank(160.0), until_s=200.0)
    assert shares == TimeShares(useful=100 + 20, lost=45, saving=5, recovering=30)


def test_a_spare_repeats_the_steps_since_the_last_snapshot() -> None:
    shares = given("spares", rank(50.75), until_s=60.0)
    assert shares == TimeShares(useful=50 + 7.25, lost=0.75, recovering=2)


def test_a_job_loads_from_where_its_newest_state_is() -> None:
    # The snapshot at 80 is older than the save at 100, which is durable at 105.
    times = replace(PLAIN, snapshot_interval_s=80.0, snapshot_load_s=1.0, load_s=9.0)
    shares = predict_given(times, BY_NAME["spares"], [rank(106.0)], 117.0)
    assert shares == TimeShares(useful=100, lost=1, saving=5, recovering=2 + 9)
    shares = predict_given(times, BY_NAME["spares"], [rank(90.0)], 93.0)
    assert shares == TimeShares(useful=80, lost=10, saving=0, recovering=2 + 1)


def lost(at_s: float, *machines: int) -> ClusterEvents:
    return ClusterEvents(at_s=at_s, lost=frozenset(machines))


@pytest.mark.parametrize(
    ("machines", "lost_s"),
    [
        # The newest copy that was complete at 99.5 is of 90; the next is complete at 102.
        ((3,), 9.5),
        ((3, 5), 9.5),
        # The buddy of machine 3 is machine 4: back to the begin.
        ((3, 4), 99.5),
        # The last machine's buddy is the first.
        ((0, 7), 99.5),
    ],
)
def test_buddies_return_to_their_copy_unless_both_are_lost(
    machines: tuple[int, ...], lost_s: float
) -> None:
    job = WholeJob(BY_NAME["buddies"], PLAIN, range(10), 8)
    shares = job.run(EventStream([lost(99.5, *machines)]), 101.0)
    assert shares.lost == pytest.approx(8 * lost_s)
    job = WholeJob(BY_NAME["spares"], PLAIN, range(10), 8)
    assert job.run(EventStream([lost(99.5, *machines)]), 101.0).lost == pytest.approx(8 * 99.5)


def test_a_machine_that_replaced_a_buddy_has_no_copy_yet() -> None:
    # Machine 4, replaced at 50, receives the copy of machine 3 within 10 + 2 s of training.
    for at_s, lost_s in ((55.0, 43.0), (70.0, 58.0 - 50.0)):
        job = WholeJob(BY_NAME["buddies"], PLAIN, range(10), 8)
        shares = job.run(EventStream([lost(50.0, 4), lost(at_s, 3)]), at_s)
        before = shares.lost
        shares = job.run(EventStream([lost(at_s, 3)]), at_s + 1)
        assert shares.lost - before == pytest.approx(8 * lost_s), at_s


def test_a_lost_replica_costs_the_aborted_step_stalls_and_its_share_of_the_steps() -> None:
    times = replace(PLAIN, step_s=2.0, save_stall_s=0.0, replica_stall_s=3.0, donor_stall_s=1.0)
    job = ReplicatedJob(BY_NAME["replicas"], times, range(4), 4)
    shares = job.run(EventStream([ClusterEvents(at_s=101.0, rank_lost=frozenset({1}))]), 200.0)
    # All lose 1 s of the step. Three stall for 3 s, and the fourth starts for 30 s; when it joins,
    # all but it stall for 1 s, and so does it.
    assert shares.lost == pytest.approx(4 * 1.0)
    assert shares.recovering == pytest.approx(3 * 3.0 + 30.0 + 4 * 1.0)
    assert shares.waiting == 0
    assert shares.capacity == pytest.approx(800.0)


@pytest.mark.parametrize(("source", "kept_s"), [("storage", 100.0), ("snapshot", 149.0)])
def test_after_all_replicas_have_died_the_newest_state_that_is_left_counts(
    source: str, kept_s: float
) -> None:
    times = replace(PLAIN, save_stall_s=0.0, write_s=10.0, load_s=7.0, snapshot_load_s=4.0)
    machines = frozenset({0, 1})
    event = (
        ClusterEvents(at_s=149.5, lost=machines)
        if source == "storage"
        else ClusterEvents(at_s=149.5, rank_lost=machines)
    )
    job = ReplicatedJob(BY_NAME["replicas"], times, range(4), 2)
    shares = job.run(EventStream([event]), 200.0)
    restore_s = 7.0 if source == "storage" else 4.0
    assert shares.useful == pytest.approx(2 * (kept_s + 200 - 149.5 - 30 - restore_s))
    assert shares.lost == pytest.approx(2 * (149.5 - kept_s))
