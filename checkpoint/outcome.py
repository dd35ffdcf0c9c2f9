"""What ranks tell each other about saving, in the one exchange of numbers of a step.

Layer: imports nothing of the project.
"""

from dataclasses import astuple, dataclass


@dataclass
class Signals:
    """Of one rank; then, summed, of all."""

    failed: float = 0.0
    """Its part of the save under way cannot be written."""
    committed: float = 0.0
    """The save under way is committed; said by the leader."""
    wants: float = 0.0
    """A save is late, and may begin after this step."""
    copy_s: float = 0.0
    """That its last snapshot took."""
    step_s: float = 0.0
    """That its last step took."""
    lacking: float = 0.0
    """It has not completed its last snapshot."""

    def numbers(self) -> list[float]:
        """In the order of the fields."""
        return list(astuple(self))


NUM_SIGNALS = len(Signals().numbers())
