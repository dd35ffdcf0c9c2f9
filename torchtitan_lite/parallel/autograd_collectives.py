"""Differentiable collectives. Every rank of the group must call them in the same order."""

import torch
import torch.distributed as dist


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [*] -> [ranks, *], in rank order. The backward is a reduce-scatter."""
    return _AllGather.apply(x, group)


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange [ranks, *] -> [ranks, *]: row i goes to rank i, and row i comes from rank i."""
    return _AllToAll.apply(x, group)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks. The gradient is the sum of the ranks' gradients."""
    return _AllReduce.apply(x, group)


def exchange_rows(
    x_ND: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows [sum of sent, D] -> [sum of received, D]: the first `sent[0]` rows go to rank
    0, and so on; received rows are in rank order. A count may be 0."""
    return _ExchangeRows.apply(x_ND, sent, received, group)


def shard_rows(x_ND: torch.Tensor, start: int, stop: int, group: dist.ProcessGroup):
    """Return the rows from `start` to `stop` of a replicated tensor. The ranks' shards cover all
    rows; in backward each rank gets the gradient of all rows."""
    return _ShardRows.apply(x_ND, start, stop, group)


def unshard_rows(x_ND: torch.Tensor, start: int, total: int, group: dist.ProcessGroup):
    """Replicate rows that are sharded by `shard_rows`; this rank's begin at `start` of `total`. The
    gradient must be the same on all ranks."""
    return _UnshardRows.apply(x_ND, start, total, group)


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


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[override]
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _summed(grad, ctx.group), None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


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


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, sent, received, group):  # type: ignore[override]
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange_rows(x_ND, sent, received, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _exchange_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange_rows(
    x_ND: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out_ND = x_ND.new_empty(sum(received), *x_ND.shape[1:])
    dist.all_to_all_single(out_ND, x_ND.contiguous(), received, sent, group=group)
    return out_ND


class _ShardRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, start, stop, group):  # type: ignore[override]
        ctx.start, ctx.total, ctx.group = start, len(x_ND), group
        return x_ND[start:stop].clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _replicate(grad, ctx.start, ctx.total, ctx.group), None, None, None


class _UnshardRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, start, total, group):  # type: ignore[override]
        ctx.start, ctx.stop = start, start + len(x_ND)
        return _replicate(x_ND, start, total, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad[ctx.start : ctx.stop].clone(), None, None, None


def _replicate(
    x_ND: torch.Tensor, start: int, total: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Sum with zeros, because gloo does not gather uneven shards."""
    whole_ND = x_ND.new_zeros(total, *x_ND.shape[1:])
    whole_ND[start : start + len(x_ND)] = x_ND
    dist.all_reduce(whole_ND, group=group)
    return whole_ND
