import math

import pytest

from torchtitan_lite.tools.report import compare, read_run
from torchtitan_lite.tools.report.comparison import StepDifference, config_differences


def compared(first, other):
    return compare(read_run(first), read_run(other))


def test_equal_runs_have_no_difference(make_run):
    actual = compared(make_run("a"), make_run("b"))
    assert actual.steps == (1, 2, 3, 4)
    assert actual.first_difference("loss") is actual.first_difference("grad_norm") is None
    assert actual.exceeds(0.0) is None


def test_the_first_and_the_largest_difference(make_run):
    changes = {2: {"loss": 7.9}, 4: {"loss": 3.8}, 3: {"grad_norm": 0.5}}
    actual = compared(make_run("a"), make_run("b", changes=changes))
    first, largest = actual.first_difference("loss"), actual.largest("loss")
    assert first is not None and (first.step, first.first, first.other) == (2, 7.8, 7.9)
    assert first.absolute == pytest.approx(0.1) and first.relative == pytest.approx(0.1 / 7.9)
    assert largest is not None and (largest.step, largest.relative) == (4, pytest.approx(0.5))
    norm = actual.first_difference("grad_norm")
    assert norm is not None and norm.step == 3
    why = actual.exceeds(0.1)
    assert why is not None and "loss of b differs from a by 0.5 (relative) at step 4" in why
    assert actual.exceeds(0.6) is None


def test_only_common_steps_are_compared(make_run):
    actual = compared(make_run("a", steps=3), make_run("b", steps=6))
    assert actual.steps == (1, 2, 3)


def test_a_run_that_ends_early_exceeds_any_limit(make_run):
    actual = compared(make_run("a", steps=6), make_run("b", steps=3))
    ends = "the last committed step of b is 3, that of a is 6"
    assert actual.different_ends() == actual.exceeds(math.inf) == ends
    actual = compared(make_run("a"), make_run("c", steps=2, changes={2: {"loss": 1.0}}))
    why = actual.exceeds(0.0)
    assert why is not None and "of c is 2, that of a is 4; loss of c differs from a" in why


def test_a_last_step_that_was_skipped_is_not_committed(make_run):
    actual = compared(make_run("a"), make_run("b", changes={4: {"skipped": True}}))
    assert actual.last_steps == (4, 3) and actual.exceeds(math.inf) is not None


def test_without_common_steps_any_limit_is_exceeded(make_run, tmp_path):
    other = make_run("b")
    lines = (other / "metrics.jsonl").read_text().replace('"step": ', '"step": 10')
    (other / "metrics.jsonl").write_text(lines)
    actual = compared(make_run("a"), other)
    assert actual.largest("loss") is None
    assert actual.exceeds(math.inf) == "b and a have no step in common"


@pytest.mark.parametrize(
    ("first", "other", "relative"),
    [
        (1.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (0.0, -0.0, 0.0),
        (1.0, 0.0, 1.0),
        (1.0, -1.0, 2.0),
        (1e308, -1e308, 2.0),
        (None, None, 0.0),
        (None, 1.0, math.inf),
    ],
)
def test_relative_differences(first, other, relative):
    assert StepDifference(1, first, other).relative == relative


def test_configs_are_compared_key_by_key():
    first = {"a": {"b": 1, "c": True, "gone": []}, "same": {"x": "y"}}
    other = {"a": {"b": 2, "c": False}, "same": {"x": "y"}, "new": {"z": "text"}}
    assert config_differences(first, other) == (
        ("a.b", "1", "2"),
        ("a.c", "true", "false"),
        ("a.gone", "[]", ""),
        ("new.z", "", "'text'"),
    )


def test_losses_at_equal_tokens_and_in_equal_time(make_run):
    def changes(tokens, step_time_s):
        return {
            step: {
                "loss": 8.0 - step,
                "tokens": tokens * step,
                "time": 100 + step_time_s * step,
                "step_time_s": step_time_s,
            }
            for step in range(1, 5)
        }

    # The other run has batches twice as large, and steps that take four times as long.
    actual = compared(
        make_run("a", changes=changes(10, 1.0)), make_run("b", changes=changes(20, 4.0))
    )
    tokens, seconds = actual.budgets
    assert (tokens.axis, tokens.amount) == ("tokens", 40)
    # Means over all steps up to there: 4 of the first run, 2 of the other.
    assert (tokens.first, tokens.other) == (5.5, 6.5)
    assert (seconds.axis, seconds.amount, seconds.first, seconds.other) == ("seconds", 4, 5.5, 7.0)


def test_a_loss_that_is_not_finite_has_no_mean(make_run):
    actual = compared(make_run("a"), make_run("b", changes={2: {"loss": math.inf}}))
    assert [one.other for one in actual.budgets] == [None, None]
