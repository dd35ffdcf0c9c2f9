"""Ring attention (arXiv:2310.01889): keys and values go round the ranks, and each rank merges what
its queries see of them by the log-sum-exp of the scores.

A rank sees either all, half, or its own causal part of what passes by, so no mask is needed: with
head-tail balancing each pass costs every rank the same. Layer: imports sequence_cut and
torch_compat.
"""

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite.parallel.sequence_cut import SequenceCut
from torchtitan_lite.torch_compat import attention_backward, attention_with_lse


class RingKernel(nn.Module):
    """Causal attention over keys and values that lie on all ranks of a group."""

    def __init__(self, cut: SequenceCut, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._cut = cut
        self._group = group

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: object
    ) -> torch.Tensor:
        return _Ring.apply(q_BHSE, k_BKSE, v_BKSE, self._cut, self._group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cut: SequenceCut, group):  # type: ignore[override]
        q, passing = q.contiguous(), torch.stack([k, v])
        out = torch.zeros_like(q)
        lse = q.new_full(
            q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32)
        )
        for turn in range(cut.num_ranks):
            arriving, requests = _pass_on(passing, group, last=turn == cut.num_ranks - 1)
            seen = _seen(cut, turn, q.shape[2])
            if seen is not None:
                queries, keys, causal = seen
                k_part, v_part = (_repeat(x[:, :, keys], q) for x in passing)
                part, part_lse = attention_with_lse(q[:, :, queries], k_part, v_part, causal)
                merged = torch.logaddexp(lse[:, :, queries], part_lse)
                old = (lse[:, :, queries] - merged).exp()[..., None]
                new = (part_lse - merged).exp()[..., None]
                out[:, :, queries] = (out[:, :, queries] * old + part * new).to(out.dtype)
                lse[:, :, queries] = merged
            passing = _arrived(arriving, requests)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.cut, ctx.group = cut, group
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        cut, group = ctx.cut, ctx.group
        grad_out = grad_out.contiguous()
        passing = torch.stack([k, v])
        grad_q = torch.zeros_like(q)
        # The gradients travel one turn behind the keys and values that they belong to, and after
        # the last turn they are home.
        grads = torch.zeros_like(passing)
        for turn in range(cut.num_ranks):
            last = turn == cut.num_ranks - 1
            arriving, requests = _pass_on(passing, group, last=last)
            seen = _seen(cut, turn, q.shape[2])
            if seen is not None:
                queries, keys, causal = seen
                k_part, v_part = (_repeat(x[:, :, keys], q) for x in passing)
                part_q, part_k, part_v = attention_backward(
                    grad_out[:, :, queries],
                    q[:, :, queries],
                    k_part,
                    v_part,
                    out[:, :, queries],
                    lse[:, :, queries],
                    causal,
                )
                grad_q[:, :, queries] += part_q
                for row, part in enumerate((part_k, part_v)):
                    grads[row][:, :, keys] += part.unflatten(1, (k.shape[1], -1)).sum(2)
            passing = _arrived(arriving, requests)
            grads = _arrived(*_pass_on(grads, group, last=False))
        return grad_q, grads[0], grads[1], None, None


def _seen(cut: SequenceCut, turn: int, length: int) -> tuple[slice, slice, bool] | None:
    """(own queries, keys that pass by in this turn, whether causal among them) that attend."""
    source = (cut.rank - turn) % cut.num_ranks
    everything, half = slice(0, length), length // 2
    if source == cut.rank:
        return everything, everything, True
    if not cut.head_tail:
        return (everything, everything, False) if source < cut.rank else None
    if source < cut.rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False


def _repeat(x_BKSE: torch.Tensor, q_BHSE: torch.Tensor) -> torch.Tensor:
    """Each key/value head for every query head that shares it."""
    return x_BKSE.repeat_interleave(q_BHSE.shape[1] // x_BKSE.shape[1], dim=1)


def _pass_on(
    x: torch.Tensor, group: dist.ProcessGroup, *, last: bool
) -> tuple[torch.Tensor, list[dist.Work]]:
    """Start to send `x` to the next rank and to receive the previous one's; nothing if `last`."""
    if last:
        return x, []
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(x)
    following = dist.get_global_rank(group, (rank + 1) % size)
    previous = dist.get_global_rank(group, (rank - 1) % size)
    operations = [
        dist.P2POp(dist.isend, x.contiguous(), following, group),
        dist.P2POp(dist.irecv, arriving, previous, group),
    ]
    return arriving, dist.batch_isend_irecv(operations)


def _arrived(arriving: torch.Tensor, requests: list[dist.Work]) -> torch.Tensor:
    for request in requests:
        request.wait()
    return arriving
