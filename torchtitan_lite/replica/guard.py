"""Never backwards: what this replica has seen of the run's progress, and what is below it.

Progress is the place in the global order of samples, which every step moves on that is settled, be
it committed or refused. Layer: imports errors only.
"""

from torchtitan_lite.errors import ReplicaError


class Floor:
    """The furthest progress that was seen.

    Invariant: no step is taken from a state that is behind it. A replica that finds itself alone
    with an old state (its donor died, or a slow network let it believe that nobody else is there)
    stops here, and does not begin the run again beside those who are ahead.
    """

    def __init__(self, progress: int) -> None:
        self._highest = progress

    @property
    def highest(self) -> int:
        return self._highest

    def raise_to(self, progress: int) -> None:
        """Somebody was seen there."""
        self._highest = max(self._highest, progress)

    def admit(self, max_progress: int) -> None:
        """A quorum was found whose foremost replica is at `max_progress`. Raises ReplicaError when
        that is behind what was seen, before anything of it is used."""
        if max_progress < self._highest:
            raise ReplicaError(
                f"The replicas that were found are at sample {max_progress} at most, but this one "
                f"has seen the run at sample {self._highest}. It leaves without taking a step, so "
                "that nothing is trained again: start it again to resume from the newest "
                "checkpoint."
            )
        self._highest = max_progress
