"""Where the time of a cluster went.

Invariant: the parts add up to the capacity, in seconds of machines.
"""

from dataclasses import dataclass, fields


@dataclass
class TimeShares:
    """Machine-seconds by use."""

    useful: float = 0.0
    """Steps that were kept."""
    lost: float = 0.0
    """Steps that were computed again after a failure, and aborted ones."""
    exchanging: float = 0.0
    """Steps that wait for the sum of the gradients between replicas."""
    saving: float = 0.0
    """Training blocked by saves and snapshots."""
    recovering: float = 0.0
    """Detection, restart, restore and stalls."""
    waiting: float = 0.0
    """Machines that are missing, or that wait for missing ones."""

    @property
    def capacity(self) -> float:
        """All machine-seconds."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def goodput(self) -> float:
        """Share of the capacity in steps that were kept; 1 without any capacity."""
        return self.useful / self.capacity if self.capacity else 1.0

    def shares(self) -> dict[str, float]:
        """Return the share of each part in the capacity."""
        total = self.capacity or 1.0
        return {field.name: getattr(self, field.name) / total for field in fields(self)}

    def lose(self, work: float) -> None:
        """Move machine-seconds from kept to lost steps."""
        self.useful -= work
        self.lost += work
