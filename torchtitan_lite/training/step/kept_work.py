"""What this rank has computed of an aborted step: the gradients stay in the parameters, and its
samples are not computed again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchtitan_lite.fault_tolerance.replica import Share
from torchtitan_lite.nn.spec import Microbatch


@dataclass
class KeptWork:
    """Work of the last step if it was aborted; empty after another step."""

    position: tuple[int, int] = (-1, -1)
    """Committed steps and data cursor at which it was computed."""
    rounds: set[int] = field(default_factory=set)
    """Rounds of samples, of all ranks of this replica, counted from the start of the step."""
    microbatches: list[Microbatch] = field(default_factory=list)
    """Those of this rank."""
    loss: torch.Tensor | None = None
    """Loss summed over their target tokens, 0-d."""

    def computed(self, position: tuple[int, int], num_rounds: int) -> list[bool]:
        """Return for each round of a step whether it has been computed, with the state at
        `position`."""
        is_same = position == self.position
        return [is_same and place in self.rounds for place in range(num_rounds)]

    def fits(self, share: Share, min_rounds: int) -> bool:
        """Return whether the participants count on this work, and on no other of this replica.
        `min_rounds` is the number of rounds that a replica needs."""
        owned = {place for place, owner in enumerate(share.owners) if owner == share.index}
        return share.reuses_work(min_rounds) and owned == self.rounds

    def add(
        self,
        position: tuple[int, int],
        samples: Sequence[range],
        round_size: int,
        microbatches: Sequence[Microbatch],
        loss: torch.Tensor,
    ) -> None:
        """Keep the work of an aborted step, which includes what was kept before. `samples` are the
        new ones of all ranks of this replica, `round_size` of them per round."""
        cursor = position[1]
        starts = (start for part in samples for start in part[::round_size])
        self.position, self.loss = position, loss
        self.rounds |= {(start - cursor) // round_size for start in starts}
        self.microbatches = [*microbatches]

    def clear(self) -> None:
        """Drop it."""
        self.position, self.rounds, self.microbatches, self.loss = (-1, -1), set(), [], None
