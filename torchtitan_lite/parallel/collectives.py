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


def exchange_rows(
    x_ND: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """[sum of sent, D] -> [sum of received, D]: the first `sent[0]` rows go to rank 0, and so on;
    those that come in are in rank order. A share may be empty."""
    return _ExchangeRows.apply(x_ND, sent, received, group)


def part_of_rows(x_ND: torch.Tensor, start: int, stop: int, group: dist.ProcessGroup):
    """The rows from `start` to `stop` of what all ranks hold alike, where each rank takes a part of
    its own and the parts cover all: in backward each rank gets the gradient of all rows."""
    return _PartOfRows.apply(x_ND, start, stop, group)


def rows_of_parts(x_ND: torch.Tensor, start: int, total: int, group: dist.ProcessGroup):
    """The inverse of `part_of_rows`: each rank's rows, which begin at `start` of `total`, put
    together on all of them. The gradient must be the same on all ranks."""
    return _RowsOfParts.apply(x_ND, start, total, group)


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


class _PartOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, start, stop, group):  # type: ignore[override]
        ctx.start, ctx.total, ctx.group = start, len(x_ND), group
        return x_ND[start:stop].clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _put_together(grad, ctx.start, ctx.total, ctx.group), None, None, None


class _RowsOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, start, total, group):  # type: ignore[override]
        ctx.start, ctx.stop = start, start + len(x_ND)
        return _put_together(x_ND, start, total, group)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad[ctx.start : ctx.stop].clone(), None, None, None


def _put_together(
    x_ND: torch.Tensor, start: int, total: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """By a sum with zeros, since gloo gathers no uneven parts."""
    whole_ND = x_ND.new_zeros(total, *x_ND.shape[1:])
    whole_ND[start : start + len(x_ND)] = x_ND
    dist.all_reduce(whole_ND, group=group)
    return whole_ND
