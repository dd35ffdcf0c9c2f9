"""Interface of the training loop to the replicas: the share of a step, the quorum, the reduction
and the vote."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from torchtitan_lite.checkpoint.background import SINGLE_REPLICA, WriterGroup
from torchtitan_lite.core.events import StepEvent


@dataclass(frozen=True, kw_only=True)
class Share:
    """This replica's share of a step."""

    index: int
    """Index among the participants; -1 for a spare, which contributes nothing."""
    count: int
    one_batch_per_replica: bool = False
    """Whether each participant takes a whole batch, instead of a share of one."""
    owners: tuple[int, ...] = ()
    """Participant that has computed each round of the step before the step was aborted, -1 for a
    round that is lost; empty if no participant has kept work."""

    def step_size(self, batch_size: int) -> int:
        """Samples in the step, over all replicas."""
        return batch_size * self.count if self.one_batch_per_replica else batch_size

    def samples(self, cursor: int, batch_size: int, round_size: int, fewest: int = 1) -> range:
        """Return the samples of this replica in the step that starts at `cursor`. They are a
        multiple of `round_size`, which divides `batch_size`; at least `fewest` rounds or none; and
        otherwise as equal between replicas as possible."""
        if self.index < 0:
            return range(cursor, cursor)
        if self.one_batch_per_replica:
            start = cursor + self.index * batch_size
            return range(start, start + batch_size)
        parts = max(1, batch_size // round_size // fewest)

        def place(index: int) -> int:
            part = parts * index // self.count
            # The remainder goes to the last participant.
            return batch_size if part == parts else part * fewest * round_size

        return range(cursor + place(self.index), cursor + place(self.index + 1))

    def reuses_work(self, min_rounds: int = 1) -> bool:
        """Return whether participants reuse what they have computed of the step: no round is lost,
        or at least `min_rounds` are."""
        num_lost = self.owners.count(_LOST)
        return bool(self.owners) and (not num_lost or num_lost >= min_rounds)

    def parts(
        self, cursor: int, batch_size: int, round_size: int, fewest: int = 1
    ) -> Sequence[range]:
        """Return the samples that this replica computes: `samples`, or, if the participants reuse
        work, its part of those that are lost, which balances what all have computed."""
        if not self.reuses_work(fewest):
            return [self.samples(cursor, batch_size, round_size, fewest)]
        lost = [place for place, owner in enumerate(self.owners) if owner == _LOST]
        quotas = self._quotas(len(lost), fewest)
        first = sum(quotas[: self.index])
        own = lost[first : first + quotas[self.index]]
        starts = (cursor + place * round_size for place in own)
        return [range(start, start + round_size) for start in starts]

    def _quotas(self, num_lost: int, fewest: int) -> list[int]:
        """Return the number of lost rounds for each participant, 0 or at least `fewest`."""
        computed = [self.owners.count(participant) for participant in range(self.count)]
        quotas, last = [0] * self.count, 0
        for _ in range(num_lost // fewest):
            last = min(range(self.count), key=lambda p: computed[p] + quotas[p])
            quotas[last] += fewest
        quotas[last] += num_lost % fewest
        return quotas


_LOST = -1


class LeaveRequested(Exception):
    """Stop request received while waiting for other replicas."""


class Replicas(Protocol):
    """The replicas of the job, as one of them sees them. In each step, all ranks of a replica call
    the methods that the step needs, in the order of this class."""

    def agree(self) -> Share:
        """Form the quorum of the next step, and heal if this replica lags. Raises ReplicaError if
        it cannot take part, and LeaveRequested if a stop was requested while it waited for
        others."""
        ...

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients of this replica survive a reduction that failed."""
        ...

    def exchange_kept_work(self, share: Share, computed: Callable[[], Sequence[bool]]) -> Share:
        """Return `share` with the owners of kept work. `computed` returns, for each round of the
        step, whether this replica has computed it before the step was aborted. Called by all ranks
        after `agree`."""
        ...

    @property
    def always_commits(self) -> bool:
        """Whether `should_commit` is always true, so that a step need not wait for it."""
        ...

    @property
    def writer_group(self) -> WriterGroup:
        """The participants as writers of one checkpoint."""
        ...

    def reduce_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce gradients during the next backward, which must be the last one of this step."""
        ...

    def reduce(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        """Sum the gradients of this rank's parameters, and `counts`, over the replicas in place.
        The same rank of each replica holds the same shards."""
        ...

    def should_commit(self, num_ranks: float, cursor_sum: float, step_sum: float) -> bool:
        """Vote, and return whether the reduction succeeded on all ranks of all replicas. If not,
        the step is retried with the same samples. `num_ranks` is the number of ranks that
        contributed, `cursor_sum` and `step_sum` are the sums of their positions in the data and of
        their steps."""
        ...

    def all_reduce(self, counts: torch.Tensor) -> bool:
        """Sum `counts` over the replicas in place after the vote, and return whether it succeeded.
        Called only if the reduced numbers of the step make all replicas call it."""
        ...

    def after_rollback(self, *, is_source: bool) -> None:
        """Notify of a rollback to an earlier step. A replica with the state of that step donates it
        to the others before the next step."""
        ...

    def finish_step(self, *, committed: bool, is_last: bool) -> None:
        """Average the states of all replicas after a committed step, if due, restore this replica's
        gradients after an aborted one if it `keeps_gradients`, and start to form the next quorum
        unless the step `is_last`. The state must not be modified before the next step. Raises as
        `agree` does."""
        ...

    def events(self) -> list[StepEvent]:
        """Return the events since the last call."""
        ...

    def close(self) -> None:
        """Leave the other replicas, so that they do not wait for this one. Idempotent."""
        ...


class SingleReplica:
    """Job without fault tolerance: one replica."""

    def agree(self) -> Share:
        return Share(index=0, count=1)

    @property
    def keeps_gradients(self) -> bool:
        return False

    def exchange_kept_work(self, share: Share, computed: Callable[[], Sequence[bool]]) -> Share:
        return share

    @property
    def always_commits(self) -> bool:
        return True

    @property
    def writer_group(self) -> WriterGroup:
        return SINGLE_REPLICA

    def reduce_during_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        return None

    def reduce(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        return None

    def should_commit(self, num_ranks: float, cursor_sum: float, step_sum: float) -> bool:
        return True

    def all_reduce(self, counts: torch.Tensor) -> bool:
        return True

    def after_rollback(self, *, is_source: bool) -> None:
        return None

    def finish_step(self, *, committed: bool, is_last: bool) -> None:
        return None

    def events(self) -> list[StepEvent]:
        return []

    def close(self) -> None:
        return None
