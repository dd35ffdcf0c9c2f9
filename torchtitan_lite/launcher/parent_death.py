"""Processes that die with the one that started them. Linux only. Layer: imports nothing of the
project.

The kernel keeps the wish through an exec, and forgets it at a fork: each process asks for itself.
It counts the parent as dead when the thread that forked ends, so that forks belong to the main one.
"""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Have this process killed when its parent dies. A parent that has died before is not noticed:
    look for it afterwards."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def parent_of(pid: int) -> int:
    """The parent of a process; 0 when that is not seen from here, or the process is gone."""
    try:
        # The name, in parentheses, may hold anything.
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
    except OSError:
        return 0
    return int(after_name.split()[1])


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


# Loaded before any fork: a child of fork may not wait for a lock of the loader.
_libc = ctypes.CDLL(None, use_errno=True)
