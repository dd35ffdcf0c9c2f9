"""A process that gives way to others, for cores and for the disk. Layer: imports nothing of the
project.
"""

import ctypes
import os
import platform
from contextlib import suppress

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS = 1
_CLASS_SHIFT = 13
_CLASS_IDLE = 3
_CLASS_BEST_EFFORT = 2
_BEST_EFFORT_NORMAL = 4


def give_way(nice: int, *, io_idle: bool) -> None:
    """Lower this process's priority. Where the system does not allow it, nothing changes."""
    if nice:
        with suppress(OSError):
            os.nice(nice)
    if io_idle:
        _set_io_class(_CLASS_IDLE, 0)


def hurry() -> None:
    """Take part in disk I/O as other processes do. The niceness stays: raising it back needs
    rights."""
    _set_io_class(_CLASS_BEST_EFFORT, _BEST_EFFORT_NORMAL)


def _set_io_class(io_class: int, level: int) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(number, _WHO_PROCESS, 0, io_class << _CLASS_SHIFT | level)
