"""Checks of this process: its wall clock, its file descriptors and its address space.

Each finds a fault of the machine before it looks like one of the training: a rank without
descriptors fails at its next save or heal, one without memory in an allocation that has nothing to
do with the cause. No torch. Layer: above diagnosis.
"""

import errno
import os
import resource
import time
from collections.abc import Callable

from torchtitan_lite.diagnosis import Cause, Diagnosis

_JUMP_S = 2.0
"""Smallest jump of the clock. NTP changes the rate of a clock, by less than a millisecond per
second, and jumps only after an offset of at least 128 ms has lasted for minutes."""
_INTERVAL_S = 1.0
_FULL = 0.95
"""Fraction of a limit from which it is as good as reached."""


class ProcessChecks:
    """Checks of the process of one rank. A finding is reported once, until it is over."""

    def __init__(
        self,
        rank: int,
        *,
        wall_s: Callable[[], float] = lambda: time.time(),
        monotonic_s: Callable[[], float] = time.monotonic,
        usage: "Callable[[], dict[Cause, str]] | None" = None,
    ) -> None:
        """The clocks are replaced in tests, and so is `usage`, which returns the limits that this
        process has reached, with their text."""
        self._rank, self._wall_s, self._monotonic_s = rank, wall_s, monotonic_s
        self._usage = usage or reached_limits
        self._offset_s = wall_s() - monotonic_s()
        self._due_s = monotonic_s()
        self._reached: set[Cause] = set()

    def check(self) -> list[Diagnosis]:
        """Return new findings. Cheap enough for each step: most calls read two clocks."""
        now_s = self._monotonic_s()
        offset_s = self._wall_s() - now_s
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        found: list[tuple[Cause, str]] = []
        if abs(jump_s) >= _JUMP_S:
            found.append((Cause.CLOCK_JUMP, f"its wall clock jumped by {jump_s:+.1f} s"))
        if now_s >= self._due_s:
            self._due_s = now_s + _INTERVAL_S
            reached = self._usage()
            found += [entry for entry in reached.items() if entry[0] not in self._reached]
            self._reached = set(reached)
        return [Diagnosis(cause=cause, text=text, rank=self._rank) for cause, text in found]


def reached_limits() -> dict[Cause, str]:
    """Return the limits of resources that this process has reached or is about to, with a text."""
    found: dict[Cause, str] = {}
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Less the one that lists them.
        num_open = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            found[Cause.OUT_OF_DESCRIPTORS] = f"no file descriptor is free: {error.strerror}"
        return found
    if limit != resource.RLIM_INFINITY and num_open >= _FULL * limit:
        text = f"{num_open} of {limit} file descriptors are in use: raise the limit (ulimit -n)"
        found[Cause.OUT_OF_DESCRIPTORS] = text
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        if used >= _FULL * limit:
            found[Cause.OUT_OF_MEMORY] = (
                f"{used >> 20} of {limit >> 20} MiB of address space are in use: raise the limit "
                "(ulimit -v)"
            )
    return found
