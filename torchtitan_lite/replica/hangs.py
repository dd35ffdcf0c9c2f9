"""Who watches the phases of a rank, so that it does not hang for long. Layer: above watchdog,
flight_recorder and the launcher's pulse."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.launcher.pulse import PULSES, PulseWriter
from torchtitan_lite.launcher.supervised import RANK_LOGS
from torchtitan_lite.log import logger
from torchtitan_lite.phases import PhaseListener
from torchtitan_lite.replica.flight_recorder import FlightRecorder
from torchtitan_lite.replica.watchdog import StackWatchdog, limits_s


@contextmanager
def hang_listeners(hang_timeout_s: float, rank: int, folder: Path) -> Iterator[list[PhaseListener]]:
    """What is to be told of the phases of this rank until the end of the block. `folder` is where
    the flight recorder is written, unless a launcher names one."""
    limits, logs = limits_s(hang_timeout_s), os.environ.get(RANK_LOGS)
    pulse = _pulse(rank, hang_timeout_s)
    recorder = FlightRecorder(folder if logs is None else Path(logs), rank, limits)
    watchdog = StackWatchdog(limits, is_watched=pulse is not None)
    try:
        yield [recorder, watchdog] if pulse is None else [recorder, watchdog, pulse]
    finally:
        watchdog.off()
        recorder.close()


def _pulse(rank: int, hang_timeout_s: float) -> PulseWriter | None:
    """What tells the launcher; None without one."""
    path = os.environ.get(PULSES)
    if path is None:
        return None
    try:
        return PulseWriter(path, rank, limits_s(hang_timeout_s), hang_timeout_s)
    except OSError as error:
        logger.warning("The launcher cannot see whether this rank hangs: %s", error)
        return None
