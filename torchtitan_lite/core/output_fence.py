"""Outputs of a generation that has started before the lease of a lost machine has ended.

Such a generation computes at once, but writes nothing that others see before that machine has
certainly stopped: records wait in memory, checkpoint writers wait, and outputs that can do neither
delay the first step. The agent gives its ranks a time, which their checkpoint writers inherit, and
allows outputs before if the coordinator does.
"""

import os
import time

OUTPUTS_AFTER = "TORCHTITAN_LITE_OUTPUTS_AFTER"
"""Environment variable: the time by `lease_clock_s` after which this generation may write."""
_POLL_S = 0.05


def lease_clock_s() -> float:
    """Return the time by which leases are measured, the same in all processes of a machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def withholds_outputs() -> bool:
    """Whether this process must not write what others see yet."""
    return lease_clock_s() < float(os.environ.get(OUTPUTS_AFTER, "0"))


def wait_for_outputs() -> None:
    """Block until this process may write what others see."""
    while withholds_outputs():
        time.sleep(_POLL_S)


def allow_outputs() -> None:
    """Let this process, and those that it starts, write from now on."""
    os.environ[OUTPUTS_AFTER] = "0"
