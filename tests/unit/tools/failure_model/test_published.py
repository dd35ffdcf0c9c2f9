"""The model and published results."""

import math
from dataclasses import replace

import pytest

from torchtitan_lite.cli import main
from torchtitan_lite.tools.failure_model import (
    CASES,
    STRATEGIES,
    PublishedCase,
    Scenario,
    compare,
    predict,
)
from torchtitan_lite.tools.failure_model.published_cases import CONSTANTS

BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}
IDS = [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_deviation_is_the_stated_one(case: PublishedCase) -> None:
    (comparison,) = compare([case], failures=500, seed=3)
    low, high = case.accepted
    assert low <= comparison.deviation <= high, comparison.deviation_text


def test_published_shares_are_met_to_5_points_with_the_sources_own_inputs() -> None:
    own = ("FT-HSDP, all ranks restart", "FT-HSDP, replicas", "ByteRobust, dense model")
    cases = [case for case in CASES if case.name in own]
    assert [case.published for case in cases] == [44, 80, 97]
    for comparison in compare(cases, failures=500, seed=1):
        assert abs(comparison.deviation) <= 5, comparison.case.name


def _without_costs(case: PublishedCase) -> Scenario:
    """The case without saves, snapshots and repeated steps."""
    return replace(
        Scenario(),
        **{**CONSTANTS, **case.inputs, "storage_gib_per_s": math.inf},
        async_save_s_per_gib=0.0,
        write_mib_per_s=math.inf,
        heal_mib_per_s=math.inf,
        save_interval_steps=1,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # All wait for 10 of 18 min.
        ("FT-HSDP, all ranks restart", (18 - 10) / 18),
        # Of 12 replicas, all stall for 160 s, and one is back after 10 min.
        ("FT-HSDP, replicas", (8 + (10 - 160 / 60) * 11 / 12) / 18),
    ],
)
def test_the_calculations_of_ft_hsdp_follow_without_saves(name: str, expected: float) -> None:
    case = next(case for case in CASES if case.name == name)
    # A step of 1 s: what a failure interrupts is negligible.
    scenario = replace(_without_costs(case), step_s=1.0)
    (prediction,) = predict(
        scenario, [BY_NAME[case.strategy]], case.num_ranks, failures=300, seed=0
    )
    assert prediction.shares.goodput == pytest.approx(expected, abs=0.005)


def test_the_failures_of_torchpass_have_the_mean_and_variance_of_its_uniform_intervals() -> None:
    inputs = next(case for case in CASES if case.num_steps).inputs
    mean_s = inputs["mtbf_h"] * 3600 / 64
    assert mean_s == (2700 + 4500) / 2
    assert mean_s**2 / inputs["failure_shape"] == pytest.approx((4500 - 2700) ** 2 / 12)


def test_every_row_names_its_source_and_what_is_assumed() -> None:
    assert len(set(IDS)) == len(IDS)
    for case in CASES:
        assert case.source.startswith("https://")
        assert case.stated and case.assumed and case.reason
        assert not CONSTANTS.keys() & case.inputs.keys(), "one set of constants for all"


def test_the_command_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--failures", "--published", "--num-failures", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["published", "result", "published", "predicted", "deviation"]
    for case, line in zip(CASES, lines[1:], strict=False):
        assert line.startswith(case.name) and f"{case.published:.0f} {case.unit}" in line
        assert line.endswith("points" if case.unit == "%" else "%")
