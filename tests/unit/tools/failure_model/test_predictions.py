"""Predictions of all strategies: accounting, determinism, and order."""

import math
import time
from dataclasses import replace
from random import Random

import pytest

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.tools.failure_model import (
    STRATEGIES,
    ClusterEvents,
    Scenario,
    as_values,
    described,
    job_times,
    overridden,
    predict,
    predict_trace,
    table,
)
from torchtitan_lite.tools.failure_model.strategies import Strategy
from torchtitan_lite.tools.failure_model.traces import Trace

BY_NAME = {one.name: one for one in STRATEGIES}
OFTEN = Scenario(mtbf_h=500.0)


def goodputs(
    scenario: Scenario, num_ranks: int = 512, seed: int = 0, failures: int = 1500
) -> dict[str, float]:
    found = predict(scenario, STRATEGIES, num_ranks, failures=failures, seed=seed)
    return {one.strategy.name: one.shares.goodput for one in found}


@pytest.mark.parametrize("mtbf_h", [20.0, 500.0, 50_000.0])
@pytest.mark.parametrize("num_ranks", [8, 96, 4096])
def test_the_parts_are_all_of_the_time(mtbf_h: float, num_ranks: int) -> None:
    scenario = Scenario(mtbf_h=mtbf_h)
    for one in predict(scenario, STRATEGIES, num_ranks, failures=500, seed=1):
        machines = num_ranks / min(8, num_ranks // 2)
        assert one.shares.capacity == pytest.approx(machines * one.hours * 3600), one.strategy
        for name, share in one.shares.shares().items():
            assert -1e-9 <= share <= 1, (one.strategy.name, name)


def test_equal_seeds_give_equal_predictions() -> None:
    expected = goodputs(OFTEN, failures=200)
    assert goodputs(OFTEN, failures=200) == expected
    assert goodputs(OFTEN, failures=200, seed=1) != expected


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: one.name)
def test_more_failures_never_give_more_goodput(strategy: Strategy) -> None:
    found = [
        predict(Scenario(mtbf_h=mtbf_h), [strategy], 1024, failures=2000, seed=2)[0].shares.goodput
        for mtbf_h in (50_000, 2_000, 100)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.95 > found[-1]


@pytest.mark.parametrize("num_ranks", [64, pytest.param(16384, marks=pytest.mark.matrix)])
def test_spares_and_buddies_are_never_worse(num_ranks: int) -> None:
    """With the same saves and snapshots at no cost: what differs is only the recovery."""
    scenario = replace(OFTEN, snapshot_s_per_gib=0.0, async_save_s_per_gib=OFTEN.save_s_per_gib)
    found = goodputs(replace(scenario, save_interval_steps=100), num_ranks)
    assert found["buddies"] >= found["spares"] >= found["restart"]
    assert found["replicas"] > found["spares"]


def test_a_reserve_saves_waiting() -> None:
    with_reserve, without = (
        predict(
            replace(OFTEN, reserve_share=share), [BY_NAME["spares"]], 512, failures=2000, seed=0
        )
        for share in (0.2, 0.0)
    )
    assert with_reserve[0].shares.shares()["waiting"] < 0.02
    assert without[0].shares.shares()["waiting"] > 0.3


@pytest.mark.matrix
def test_a_hundred_thousand_ranks_are_simulated_in_seconds() -> None:
    began_s = time.process_time()
    (*_, found) = predict(Scenario(), STRATEGIES, 100_000, failures=200, seed=0)
    assert time.process_time() - began_s < 4
    assert found.num_ranks == 100_000 and 0 < found.shares.goodput < 1


def test_copies_to_a_buddy_follow_snapshots() -> None:
    scenario = Scenario(snapshot_interval_steps=4, buddy_interval_steps=9, buddy_mib_per_s=1e6)
    times = job_times(scenario, BY_NAME["buddies"], 64)
    assert (times.snapshot_interval_s, times.buddy_interval_s) == (24, 72)
    times = job_times(replace(scenario, buddy_interval_steps=0), BY_NAME["buddies"], 64)
    assert times.buddy_interval_s == times.snapshot_interval_s
    # The next copy waits for the one before.
    slow = replace(scenario, buddy_mib_per_s=12 * 1024 / 100)
    times = job_times(slow, BY_NAME["buddies"], 64)
    assert (times.buddy_copy_s, times.buddy_interval_s) == (pytest.approx(100), 120)


def test_a_trace_without_losses_costs_nothing_but_saves() -> None:
    trace = Trace(initial=frozenset(range(6)), changes=(), duration_s=50_000)
    for one in predict_trace(Scenario(), STRATEGIES, trace):
        shares = one.shares.shares()
        assert shares["lost"] == shares["recovering"] == 0
        # The strategies with spares keep a machine idle.
        assert shares["waiting"] == pytest.approx(1 / 6 if one.strategy.in_place else 0)
        assert one.shares.capacity == pytest.approx(6 * 50_000)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_are_all_of_the_time_of_any_trace(seed: int) -> None:
    """Machines come and go at random, several at once, also all of them."""
    random = Random(seed)
    present, changes, at_s, capacity = set(range(4)), [], 0.0, 0.0
    for _ in range(60):
        pause_s = random.choice([1.0, 30.0, 700.0, 9000.0])
        at_s, capacity = at_s + pause_s, capacity + len(present) * pause_s
        kinds = {one: random.random() for one in range(8)}
        lost = {one for one in present if kinds[one] < random.choice([0.1, 0.5, 1.0])}
        arrived = {one for one in set(range(8)) - present if kinds[one] < 0.3}
        present = present - lost | arrived
        changes.append(ClusterEvents(at_s=at_s, lost=frozenset(lost), arrived=frozenset(arrived)))
    trace = Trace(initial=frozenset(range(4)), changes=changes, duration_s=at_s)
    for one in predict_trace(Scenario(regrow_after_s=60.0), STRATEGIES, trace):
        assert one.shares.capacity == pytest.approx(capacity), one.strategy.name
        assert all(-1e-9 <= share <= 1 for share in one.shares.shares().values()), one
        assert one.shares.useful > 0


def test_overrides_are_checked() -> None:
    found = overridden(Scenario(), {"mtbf_h": "inf", "ranks_per_machine": "4", "spare_s": "1.5"})
    assert (found.mtbf_h, found.ranks_per_machine, found.spare_s) == (math.inf, 4, 1.5)
    assert {name: source for name, _, source in described(found)}["spare_s"] == "given"
    with pytest.raises(UserError) as raised:
        overridden(
            Scenario(),
            {"mtbf": "1", "step_s": "0", "machine_share": "1.1", "ranks_per_machine": "2.5"}
            | {"load_mib_per_s": "-1", "storage_gib_per_s": "nan", "restart_s": "inf"},
        )
    text = str(raised.value)
    assert "mtbf is unknown; the names are mtbf_h" in text
    assert "step_s is 0, must be finite and more than 0" in text
    assert "machine_share is 1.1, must be from 0 to 1" in text
    assert "ranks_per_machine is '2.5', must be a whole number" in text
    for name in ("load_mib_per_s", "storage_gib_per_s", "restart_s"):
        assert f"{name} is" in text
    assert len(text.splitlines()) == 1


def test_ranks_must_form_machines() -> None:
    with pytest.raises(UserError, match="at least 2 ranks"):
        predict(Scenario(), STRATEGIES, 1, failures=1, seed=0)
    with pytest.raises(UserError, match="100 ranks are not a multiple of the 8 ranks of a machine"):
        predict(Scenario(), STRATEGIES, 100, failures=1, seed=0)
    with pytest.raises(UserError, match="The 12 ranks of a replica are not a multiple of the 8"):
        predict(Scenario(ranks_per_replica=12), STRATEGIES, 96, failures=1, seed=0)
    with pytest.raises(UserError, match="72 ranks are not a multiple of the 32 ranks of a replica"):
        predict(Scenario(ranks_per_replica=32), STRATEGIES, 72, failures=1, seed=0)
    alone = [one for one in STRATEGIES if one.replicas is None]
    assert len(predict(Scenario(ranks_per_replica=32), alone, 72, failures=1, seed=0)) == 3


def test_tables_and_values_have_every_strategy() -> None:
    found = [
        one for ranks in (8, 64) for one in predict(OFTEN, STRATEGIES, ranks, failures=50, seed=0)
    ]
    lines = table(found)
    assert lines[0].split() == ["ranks", *BY_NAME]
    assert [line.split()[0] for line in lines[1:]] == ["8", "64"]
    values = as_values(replace(OFTEN, mtbf_h=math.inf), found, seed=0)
    assert values["inputs"]["mtbf_h"]["value"] is None
    assert len(values["predictions"]) == 10 and values["seed"] == 0
