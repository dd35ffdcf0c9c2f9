"""All replicas on another number of ranks: they save and leave, and begin again. Layer: above
replica, sizes and slots.

Invariant: replicas that run at the same time have the same number of ranks.
"""

from collections.abc import Callable, Sequence

from torchtitan_lite.launcher.replica import Replica, State
from torchtitan_lite.launcher.sizes import Sizes
from torchtitan_lite.launcher.slots import SlotsFile


class Reforming:
    """Finds out when replicas have to have another number of ranks, and sees to it."""

    def __init__(
        self, sizes: Sizes, slots: SlotsFile, *, grace_s: float, say: Callable[[str], None]
    ) -> None:
        """`grace_s` is what replicas get to save and leave."""
        self._sizes, self._slots, self._grace_s, self._say = sizes, slots, grace_s, say
        self.num_ranks = 0
        """Of each replica that starts now."""
        self._target = 0
        self._deadline_s: float | None = None
        """By which all have to have left; None while nothing is re-formed."""

    def begin(self, now_s: float) -> None:
        """Before the first start."""
        self.num_ranks, reason = self._sizes.wanted(self._slots.look(now_s), now_s)
        if reason:
            self._say(f"replicas begin with {_ranks(self.num_ranks)} each: {reason}")

    def died(self, replica: int, rank: int, now_s: float) -> None:
        """A rank of a replica has died."""
        self._sizes.died(replica, rank, self.num_ranks, now_s)

    def look(self, replicas: Sequence[Replica], now_s: float) -> None:
        """Do what it is time for."""
        if self._deadline_s is None:
            self._consider(replicas, now_s)
        elif all(one.has_left for one in replicas):
            self.num_ranks, self._deadline_s = self._target, None
            for replica in replicas:
                if not replica.is_over:
                    replica.begin()
        elif now_s >= self._deadline_s:
            for replica in replicas:
                replica.kill()

    def _consider(self, replicas: Sequence[Replica], now_s: float) -> None:
        target, reason = self._sizes.wanted(self._slots.look(now_s), now_s)
        if target == self.num_ranks or any(one.is_over for one in replicas):
            # Where one has finished, all are about to.
            return
        if target > self.num_ranks:
            if any(one.state is not State.TRAINING for one in replicas):
                # What is gained can wait until the last change has paid.
                return
            reason = reason or "the places are back"
        self._target, self._deadline_s = target, now_s + self._grace_s
        self._say(f"all replicas re-form with {_ranks(target)} each: {reason}")
        for replica in replicas:
            replica.reform()


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
