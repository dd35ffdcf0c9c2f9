"""Collectives that gradients flow through. Every rank of the group must call them in the same
order. Layer: imports torch only.
"""

import torch
import torch.distributed as dist


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[*] -> [ranks, *], each rank's tensor in rank order; in backward each rank gets the sum of
    the gradients of its own."""
    return _AllGather.apply(x, group)


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks, *] -> [ranks, *]: row i goes to rank i, and row i comes from rank i."""
    return _AllToAll.apply(x, group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[override]
        ctx.group = group
        gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered.unflatten(0, (group.size(), x.shape[0]))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        mine = torch.empty_like(grad[0])
        dist.reduce_scatter_tensor(mine, grad.contiguous().flatten(0, 1), group=ctx.group)
        return mine, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[override]
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _exchange(grad, ctx.group), None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
