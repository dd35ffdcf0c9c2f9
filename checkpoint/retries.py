"""When a save that failed is tried again. Layer: imports nothing of the project."""

_MOST_DOUBLINGS = 6


class Retries:
    """After a failure the next step tries again, then after twice as many steps each time, up to
    64."""

    def __init__(self) -> None:
        self.failures_in_a_row = 0
        self._from = 0

    def failed(self, step: int) -> None:
        """A save failed, as is known at `step`."""
        self._from = step + 2 ** min(self.failures_in_a_row, _MOST_DOUBLINGS)
        self.failures_in_a_row += 1

    def succeeded(self) -> None:
        """A save is durable."""
        self.failures_in_a_row = 0

    def may_try(self, step: int) -> bool:
        """Whether a save that is late may begin at `step`."""
        return step >= self._from
