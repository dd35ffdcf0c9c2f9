"""In which order each rank of a pipeline runs its stages: plain data.

Layer: imports nothing of the project.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """One microbatch through one stage, one way. Its text is torch's, such as `0F3`."""

    stage: int
    kind: Kind
    """F: forward. B: backward. I and W: backward in two parts, for the input and the weights."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PipelineOrder:
    """What each rank of the pipeline does in a step."""

    rows: tuple[tuple[Action, ...], ...]
    """The actions of each rank, one after the other. A rank waits where an action needs what
    another rank has not sent yet."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        holders = {action.stage: rank for rank, row in enumerate(self.rows) for action in row}
        return tuple(holders[stage] for stage in sorted(holders))

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def num_microbatches(self) -> int:
        return len({action.microbatch for row in self.rows for action in row})

    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [[str(action) for action in row] for row in self.rows]


def forward_only(ranks: Sequence[int], num_microbatches: int) -> PipelineOrder:
    """The order without backward for stages that lie on `ranks`: each rank runs all microbatches
    through its first stage, then through its next, so that no rank waits for itself."""
    rows = [
        tuple(
            Action(stage, "F", microbatch)
            for stage, holder in enumerate(ranks)
            if holder == rank
            for microbatch in range(num_microbatches)
        )
        for rank in range(max(ranks) + 1)
    ]
    return PipelineOrder(tuple(rows))
