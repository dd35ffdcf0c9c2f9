"""Ends a process that makes no progress, with its stacks. Layer: above phases.

The timer is the interpreter's own, in a thread that needs no lock of it: it also fires where Python
cannot run, as in a call that hangs in compiled code. A process that is stopped altogether is found
out from outside, by the launcher (see launcher/hang.py), which knows more and so comes first.
"""

import faulthandler
from collections.abc import Mapping

from torchtitan_lite.phases import Phase

_PATIENCE = {
    Phase.DATA: 1,
    Phase.COMPUTE: 1,
    # Who waits for other replicas is given longer: the one that hangs ends first.
    Phase.COMMUNICATION: 3,
    # A slow storage or a long validation is no hang.
    Phase.CHECKPOINT: 10,
    Phase.BETWEEN: 10,
}
"""Times `hang_timeout_s`; a phase that is not here may take as long as it will."""
_HEAD_START_S = 30.0
"""For the launcher to look into a hang, before a process ends itself."""


def limits_s(hang_timeout_s: float) -> dict[Phase, float]:
    """How long each phase may take that has a limit (seconds)."""
    return {phase: times * hang_timeout_s for phase, times in _PATIENCE.items()}


class StackWatchdog:
    """After the limit of a phase, writes the stacks of all threads to the standard error, and ends
    the process with status 1."""

    def __init__(self, limits: Mapping[Phase, float], *, is_watched: bool) -> None:
        """`limits` in seconds; `is_watched`: a launcher looks at this process from outside."""
        head_start_s = _HEAD_START_S if is_watched else 0.0
        self._limits = {phase: limit_s + head_start_s for phase, limit_s in limits.items()}

    def entered(self, phase: Phase, step: int) -> None:
        limit_s = self._limits.get(phase)
        if limit_s is None:
            self.off()
        else:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=2)

    def off(self) -> None:
        """What comes now may take as long as it will."""
        faulthandler.cancel_dump_traceback_later()
