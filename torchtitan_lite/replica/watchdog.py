"""Ends a process that makes no progress, with its stacks. Layer: above phases.

The timer is the interpreter's own, in a thread that needs no lock of it: it also fires where Python
cannot run, as in a call that hangs in compiled code. A process that is stopped altogether has to be
found out from outside.
"""

import faulthandler

from torchtitan_lite.phases import Phase

_PATIENCE = {
    Phase.DATA: 1,
    Phase.COMPUTE: 1,
    # Who waits for other replicas is given longer: the one that hangs ends first.
    Phase.COMMUNICATION: 3,
}
"""Times `hang_timeout_s`; a phase that is not here may take as long as it will."""


class StackWatchdog:
    """After `hang_timeout_s` without progress, writes the stacks of all threads to the standard
    error, and ends the process with status 1."""

    def __init__(self, hang_timeout_s: float) -> None:
        self._hang_timeout_s = hang_timeout_s

    def entered(self, phase: Phase, step: int) -> None:
        patience = _PATIENCE.get(phase)
        if patience is None:
            self.off()
        else:
            seconds = patience * self._hang_timeout_s
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def off(self) -> None:
        """What comes now may take as long as it will."""
        faulthandler.cancel_dump_traceback_later()
