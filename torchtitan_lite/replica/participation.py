"""Who takes part in a step, and what those who do agree on. Layer: above checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from torchtitan_lite.checkpoint.background.coworkers import ALONE, Coworkers


@dataclass(frozen=True, kw_only=True)
class Share:
    """This replica's place among those that take part in a step."""

    index: int
    """-1: it stands by, and adds nothing."""
    count: int
    each_takes_a_batch: bool = False
    """A step has a batch for each that takes part, instead of one that they share."""

    def step_size(self, batch_size: int) -> int:
        """Samples of the step, of all replicas."""
        return batch_size * self.count if self.each_takes_a_batch else batch_size

    def samples(self, cursor: int, batch_size: int, round_size: int, fewest: int = 1) -> range:
        """Those of the step that begins at `cursor` which this replica takes: rounds of
        `round_size`, a divisor of `batch_size`, `fewest` of them at least or none; else as many as
        the others, as near as that can be."""
        if self.index < 0:
            return range(cursor, cursor)
        if self.each_takes_a_batch:
            start = cursor + self.index * batch_size
            return range(start, start + batch_size)
        parts = max(1, batch_size // round_size // fewest)

        def place(index: int) -> int:
            part = parts * index // self.count
            # What does not make up a part of its own belongs to the last one.
            return batch_size if part == parts else part * fewest * round_size

        return range(cursor + place(self.index), cursor + place(self.index + 1))


class LeaveRequested(Exception):
    """This process was asked to leave between two steps."""


@dataclass(frozen=True)
class News:
    """Something that has happened to this replica or the others."""

    name: str
    """"quorum", "healed" or "step_failed"."""
    values: Mapping[str, Any]


class Replicas(Protocol):
    """The replicas of the job, as one of them sees them. All ranks of a replica call its methods
    in the order of this class, those that a step needs."""

    def agree(self) -> Share:
        """Settle who takes part in the next step. A replica that is behind comes back with the
        state of another. Raises ReplicaError where it can take no part, and LeaveRequested where
        it was asked to leave while it waited for others."""
        ...

    @property
    def coworkers(self) -> Coworkers:
        """Who has agreed, as those who write checkpoints together."""
        ...

    def sum_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        """The next backward is the last of this step: gradients may be added up as they come."""
        ...

    def sum_(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        """Add the gradients of this rank's parameters, and `counts`, over the replicas in place. A
        rank's peers in other replicas hold the same shards."""
        ...

    def settle(self, num_ranks: float, places: float, steps: float) -> bool:
        """Whether the sums hold. If not, the step is to be repeated with the same samples.
        `num_ranks` is how many ranks of all replicas have added to them, `places` and `steps`
        the sums of the samples and steps at which these ranks were."""
        ...

    def synchronize(self) -> None:
        """A step was committed: average the states of all replicas, where that is due. Raises as
        `agree` does."""
        ...

    def exchange(self, counts: torch.Tensor) -> bool:
        """Add `counts` over the replicas in place, after a step was settled; whether the sums hold.
        Called where the numbers of the step make all call it."""
        ...

    def taken_back(self, *, has_state: bool) -> None:
        """The run goes on from an earlier step. Who has its state gives it to all others before the
        next step."""
        ...

    def begin(self) -> None:
        """The state will not change any more before the next step: look for who takes part."""
        ...

    def news(self) -> list[News]:
        """What has happened since this was asked last."""
        ...

    def close(self) -> None:
        """Leave the others, who do not wait for this replica any more. Also when it has left."""
        ...


class SingleReplica:
    """Fault tolerance switched off: one replica, which agrees with itself."""

    def agree(self) -> Share:
        return Share(index=0, count=1)

    @property
    def coworkers(self) -> Coworkers:
        return ALONE

    def sum_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def sum_(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        return None

    def settle(self, num_ranks: float, places: float, steps: float) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def exchange(self, counts: torch.Tensor) -> bool:
        return True

    def taken_back(self, *, has_state: bool) -> None:
        return None

    def begin(self) -> None:
        return None

    def news(self) -> list[News]:
        return []

    def close(self) -> None:
        return None
