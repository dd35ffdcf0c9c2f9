"""Which positions of a sequence each rank of the `cp` axis holds.

Causal attention costs more for later positions. Head-tail balancing cuts the sequence into twice
as many pieces as ranks and gives rank r the pieces r and 2n - 1 - r, so that all ranks have the
same work. Layer: above spec.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist

from torchtitan_lite.parallel.collectives import all_gather
from torchtitan_lite.spec import IGNORE, Microbatch


@dataclass(frozen=True, kw_only=True)
class SequenceCut:
    """The cut of a sequence over the ranks of one cp group."""

    num_ranks: int
    rank: int
    head_tail: bool

    def order(self, length: int, device: torch.device) -> torch.Tensor:
        """The positions [S] in the order in which the ranks hold them, rank after rank."""
        return sequence_order(length, self.num_ranks, self.head_tail).to(device)

    def own(self, length: int, device: torch.device) -> torch.Tensor:
        """The positions [S / ranks] that this rank holds."""
        return self.order(length, device).chunk(self.num_ranks)[self.rank]

    def cut(self, batch: Microbatch) -> Microbatch:
        """This rank's positions of a microbatch. The documents stay whole: attention needs to know
        those of the positions that the other ranks hold."""
        if self.num_ranks == 1:
            return batch
        own = self.own(batch.tokens_BS.shape[1], batch.tokens_BS.device)
        return replace(
            batch,
            tokens_BS=batch.tokens_BS[:, own],
            targets_BS=batch.targets_BS[:, own],
            positions_BS=batch.positions_BS[:, own],
        )

    def gather(self, own_BSV: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Values of this rank's positions -> those of all positions, in their natural order."""
        if self.num_ranks == 1:
            return own_BSV
        whole_BSV = all_gather(own_BSV, group).movedim(0, 1).flatten(1, 2)
        return whole_BSV[:, self.order(whole_BSV.shape[1], whole_BSV.device).argsort()]


def plain_sequences(tokens_BS: torch.Tensor) -> Microbatch:
    """Tokens as one document each, without targets and without random draws."""
    length = tokens_BS.shape[1]
    return Microbatch(
        tokens_BS=tokens_BS,
        targets_BS=torch.full_like(tokens_BS, IGNORE),
        positions_BS=torch.arange(length, device=tokens_BS.device).expand_as(tokens_BS),
        documents_BS=None,
        keys_B=torch.zeros_like(tokens_BS[:, 0]),
        samples=(),
    )


@cache
def sequence_order(length: int, num_ranks: int, head_tail: bool) -> torch.Tensor:
    """The positions [S] in the order in which the ranks hold them, int64, without a Python loop.

    Raises ValueError when the pieces would not be equal.
    """
    pieces = 2 * num_ranks if head_tail else num_ranks
    if length % pieces:
        raise ValueError(f"A sequence of {length} positions does not divide into {pieces} pieces.")
    # The only tensor of full length is the result: memory that is new to the process costs most.
    order = torch.arange(num_ranks)
    if head_tail:
        order = torch.stack([order, pieces - 1 - order], dim=1).flatten()
    piece_length = length // pieces
    return (order[:, None] * piece_length + torch.arange(piece_length)).flatten()
