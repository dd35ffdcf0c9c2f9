"""Outputs of a generation that has started before the lease of a lost machine has ended.

Such a generation computes at once, but writes nothing that others see before that machine has
certainly stopped: records wait in memory, checkpoint writers wait, and outputs that can do neither
delay the first step. The agent gives its ranks a time, which their checkpoint writers inherit, and
allows outputs before if the coordinator does.
"""

import os
import threading
import time

from torchtitan_lite.core.preemption import TrainingAborted

OUTPUTS_AFTER = "TORCHTITAN_LITE_OUTPUTS_AFTER"
"""Environment variable: the time by `lease_clock_s` after which this generation may write."""
_POLL_S = 0.05
_is_aborted = threading.Event()


def lease_clock_s() -> float:
    """Return the time by which leases are measured, the same in all processes of a machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def begin_generation(outputs_after_s: str) -> None:
    """Withhold the outputs of this process, and of those that it starts, until then."""
    _is_aborted.clear()
    os.environ[OUTPUTS_AFTER] = outputs_after_s


def allow_outputs() -> None:
    """Let this process, and those that it starts, write from now on."""
    os.environ[OUTPUTS_AFTER] = "0"


def abort_waits() -> None:
    """Let `wait_for_outputs` raise TrainingAborted until the next generation."""
    _is_aborted.set()


def withholds_outputs() -> bool:
    """Return whether this process must not write what others see yet."""
    after_s = float(os.environ.get(OUTPUTS_AFTER, "0"))
    # Without an agent, this also runs where the system lacks that clock.
    return after_s > 0 and lease_clock_s() < after_s


def wait_for_outputs() -> None:
    """Block until this process may write what others see. Raises TrainingAborted if the agent
    aborts the training."""
    while withholds_outputs():
        if _is_aborted.wait(_POLL_S):
            raise TrainingAborted
