"""Ends a process that makes no progress, with its stacks. Layer: imports nothing of the project.

The timer is the interpreter's own, in a thread that needs no lock of it: it also fires where Python
cannot run, as in a call that hangs in compiled code. A process that is stopped altogether has to be
found out from outside.
"""

import faulthandler
from typing import Protocol

_WAITING = 3
"""Who waits for other replicas is given so many times as long: the one that hangs ends first."""


class Watchdog(Protocol):
    """Looks after one process."""

    def working(self) -> None:
        """Progress was made, and this process works on by itself."""
        ...

    def waiting(self) -> None:
        """Progress was made, and other replicas are waited for."""
        ...

    def off(self) -> None:
        """What comes now may take as long as it will."""
        ...


class NoWatchdog:
    """Lets it hang."""

    def working(self) -> None:
        return None

    def waiting(self) -> None:
        return None

    def off(self) -> None:
        return None


class StackWatchdog:
    """After `hang_timeout_s` without progress, writes the stacks of all threads to the standard
    error, and ends the process with status 1."""

    def __init__(self, hang_timeout_s: float) -> None:
        self._hang_timeout_s = hang_timeout_s

    def working(self) -> None:
        self._arm(self._hang_timeout_s)

    def waiting(self) -> None:
        self._arm(_WAITING * self._hang_timeout_s)

    def off(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def _arm(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
