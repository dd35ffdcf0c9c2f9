"""When something that failed is started again, and when it is given up. Pure: it is told the time
and what happened. Layer: above failure.
"""

from dataclasses import dataclass

from torchtitan_lite.errors import DIVERGED, MACHINE_FAULT
from torchtitan_lite.launcher.failure import Failure

_HEALTHY_S = 20.0
"""Of work, after which earlier failures count no more."""
_HOPELESS = 2
"""Equal failures in a row before any work, after which a wrong setting is the likeliest cause."""
_FINAL = {DIVERGED: "the training has diverged", MACHINE_FAULT: "its machine is at fault"}
"""Exit statuses after which another attempt would end in the same way."""


@dataclass(frozen=True)
class Restart:
    """Start it again."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """Start it no more."""

    reason: str
    first: Failure
    """The first failure of the row."""

    @property
    def spares_others(self) -> bool:
        """Whether what else runs has no part in it, and goes on."""
        return self.first.status == MACHINE_FAULT


class RestartPolicy:
    """The attempts at one thing that should keep running."""

    def __init__(
        self, max_restarts: int, *, first_delay_s: float = 0.2, max_delay_s: float = 30.0
    ) -> None:
        """`max_restarts` is how many in a row are made, the first after `first_delay_s`, each
        further one after twice the delay, up to `max_delay_s`."""
        self._max_restarts, self._first_delay_s = max_restarts, first_delay_s
        self._max_delay_s = max_delay_s
        self._row: list[Failure] = []
        self._working_since_s: float | None = None
        self._hopeless = 0

    @property
    def num_failures(self) -> int:
        """In a row."""
        return len(self._row)

    def started(self) -> None:
        """An attempt begins."""
        self._working_since_s = None

    def worked(self, now_s: float) -> None:
        """The attempt does what it is for."""
        if self._working_since_s is None:
            self._working_since_s = now_s

    def failed(self, failure: Failure, now_s: float) -> Restart | GiveUp:
        """The attempt has ended, and should not have."""
        if failure.status in _FINAL:
            return GiveUp(_FINAL[failure.status], failure)
        since_s, before = self._working_since_s, self._row[-1] if self._row else None
        if since_s is not None and now_s - since_s >= _HEALTHY_S:
            self._row = []
        self._row.append(failure)
        if since_s is not None or not failure.cause:
            self._hopeless = 0
        elif self._hopeless and before is not None and before.cause == failure.cause:
            self._hopeless += 1
        else:
            self._hopeless = 1
        if self._hopeless >= _HOPELESS:
            reason = f"it failed {_HOPELESS} times in the same way before it did anything"
            return GiveUp(reason, self._row[-_HOPELESS])
        if len(self._row) > self._max_restarts:
            reason = f"it failed {len(self._row)} times in a row"
            return GiveUp(reason, self._row[0])
        doublings = len(self._row) - 1
        return Restart(min(self._first_delay_s * 2**doublings, self._max_delay_s))
