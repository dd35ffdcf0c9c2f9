"""Signals only set a flag."""

import logging
import os
import signal

import pytest

from torchtitan_lite.log import logger
from torchtitan_lite.preemption import StopRequest, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_is_logged_once(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    logger.addHandler(caplog.handler)
    try:
        stop = StopRequest()
        with caplog.at_level(logging.WARNING, logger.name), stop_on_signals(stop):
            assert not stop.requested
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert stop.requested
    finally:
        logger.removeHandler(caplog.handler)
    records = [record for record in caplog.get_records("call") if number.name in record.message]
    assert {record.getMessage() for record in records} == {
        f"{number.name} received: finishing the step, then saving and exiting."
    }


def test_handlers_are_restored_even_after_an_error() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(RuntimeError, match="inside"), stop_on_signals(StopRequest()):
        assert [signal.getsignal(number) for number in numbers] != before
        raise RuntimeError("inside")
    assert [signal.getsignal(number) for number in numbers] == before
