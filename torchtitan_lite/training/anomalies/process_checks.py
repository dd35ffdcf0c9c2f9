"""Checks of this process: its wall clock, its file descriptors and its address space.

Each finds a fault of the machine before it looks like one of the training: a rank without
descriptors fails at its next save or heal, one without memory in an allocation that has nothing to
do with the cause. No torch.
"""

import errno
import math
import os
import resource
import time
from collections.abc import Callable

from torchtitan_lite.core.diagnosis import Cause, Diagnosis

_JUMP_S = 2.0
"""Smallest jump of the clock. NTP changes the rate of a clock, by less than a millisecond per
second, and jumps only after an offset of at least 128 ms has lasted for minutes."""
_PAUSE_S = 0.1
"""A process that waited this long between two clocks cannot compare them."""
_INTERVAL_S = 1.0
_REPEAT_S = 60.0
"""Time for which a limit must not be reached before it is reported again."""
_FULL = 0.95
"""Fraction of a limit from which it is as good as reached."""


class ProcessChecks:
    """Checks of the process of one rank. Each problem is reported once, until it is over."""

    def __init__(
        self,
        rank: int,
        *,
        wall_s: Callable[[], float] = time.time,
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        usage: "Callable[[], dict[Cause, str]] | None" = None,
    ) -> None:
        """The clocks are replaced in tests, and so is `usage`, which returns the limits that this
        process has reached, with their text."""
        # Unlike the monotonic clock, that since the boot continues while a machine is suspended.
        self._rank, self._wall_s, self._boot_s = rank, wall_s, boot_s
        self._usage = usage or reached_limits
        self._offset_s: float | None = None
        self._due_s = boot_s()
        self._reached_s: dict[Cause, float] = {}
        """When limits were reached last."""
        self._read_offset()

    def check(self) -> list[Diagnosis]:
        """Return new findings. Cheap enough for each step: most calls read two clocks."""
        before_s = self._offset_s
        now_s = self._read_offset()
        new: list[tuple[Cause, str]] = []
        if before_s is not None and self._offset_s is not None:
            jump_s = self._offset_s - before_s
            if abs(jump_s) >= _JUMP_S:
                new.append((Cause.CLOCK_JUMP, f"its wall clock jumped by {jump_s:+.1f} s"))
        if now_s >= self._due_s:
            self._due_s = now_s + _INTERVAL_S
            for cause, text in self._usage().items():
                if now_s - self._reached_s.get(cause, -math.inf) > _REPEAT_S:
                    new.append((cause, text))
                self._reached_s[cause] = now_s
        return [Diagnosis(cause=cause, text=text, rank=self._rank) for cause, text in new]

    def _read_offset(self) -> float:
        """Read the difference of the clocks; keep the last one if the process was interrupted
        meanwhile. Returns the time since the boot."""
        before_s = self._boot_s()
        wall_s, after_s = self._wall_s(), self._boot_s()
        if after_s - before_s < _PAUSE_S:
            self._offset_s = wall_s - after_s
        return after_s


def reached_limits() -> dict[Cause, str]:
    """Return the limits of resources that this process has reached or is about to, with a text."""
    reached: dict[Cause, str] = {}
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # Less the one that lists them.
        num_open = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            reached[Cause.OUT_OF_DESCRIPTORS] = f"no file descriptor is free: {error.strerror}"
        return reached
    if limit != resource.RLIM_INFINITY and num_open >= _FULL * limit:
        text = f"{num_open} of {limit} file descriptors are in use: raise the limit (ulimit -n)"
        reached[Cause.OUT_OF_DESCRIPTORS] = text
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        try:
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
        except OSError:
            # The last descriptor has been taken meanwhile, which the next check reports.
            return reached
        if used >= _FULL * limit:
            reached[Cause.OUT_OF_MEMORY] = (
                f"{used >> 20} of {limit >> 20} MiB of address space are in use: raise the limit "
                "(ulimit -v)"
            )
    return reached
