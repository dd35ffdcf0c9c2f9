import pytest

from torchtitan_lite.core.durations import time_left_s
from torchtitan_lite.training.metrics.record import mfu


def test_mfu_is_the_share_of_the_peak_of_all_devices():
    assert mfu(6e9, 1000, 1e13, 2) == pytest.approx(0.3)


def test_mfu_is_unknown_if_the_peak_is():
    assert mfu(6e9, 1000, None, 2) is None


def test_one_slow_step_does_not_dominate_the_time_left():
    assert time_left_s([30.0, 0.5, 0.5, 0.5], 10) == pytest.approx(5.0)


def test_time_left_is_unknown_before_the_first_step():
    assert time_left_s([], 10) is None
