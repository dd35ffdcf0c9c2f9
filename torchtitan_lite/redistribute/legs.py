"""Carries out the legs of a plan, one after the other. Layer: above joint.

A leg is an exchange, or a single collective of the backend. Collectives want equal parts, so parts
are filled up to the largest.
"""

import torch
import torch.distributed as dist

from torchtitan_lite.redistribute.collective import Collective
from torchtitan_lite.redistribute.joint import check_source, group_of, move
from torchtitan_lite.redistribute.means import Means
from torchtitan_lite.redistribute.plan import Plan

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def follow(
    plan: Plan, local: torch.Tensor, out: torch.Tensor | None, device: torch.device, means: Means
) -> torch.Tensor:
    """This rank's part of a plan's destination, given its part of the source. Every rank of the
    plan must call it; see `joint.move`."""
    if not plan.legs:
        return move([plan], [local], [out], device, means)[0]
    if plan.src.mesh.place(dist.get_rank()) is None:
        return local.new_empty((0,), dtype=plan.dtype) if out is None else out
    check_source(plan, local, plan.src.local_shape(plan.shape, dist.get_rank()))
    for leg in plan.legs:
        if isinstance(leg, Plan):
            (local,) = move([leg], [local], [None], device, means)
        else:
            local = run(leg, local)
    return local if out is None else out.copy_(local)


def run(leg: Collective, local: torch.Tensor) -> torch.Tensor:
    """This rank's part after a collective. Every rank of its group must call it."""
    members = _members(leg)
    group = group_of(members)
    # A group numbers its ranks by their number in the world.
    numbers = [sorted(members).index(member) for member in members]
    if leg.kind == "all_reduce":
        result = local.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, _OPS[leg.op], group=group)
        return result if leg.factor == 1 else result * leg.factor
    assert leg.dim is not None
    cut = leg.src if leg.kind == "all_gather" else leg.dst
    lengths = [cut.local_shape(leg.shape, member)[leg.dim] for member in members]
    most = max(lengths)
    if leg.kind == "all_gather":
        # gloo knows no float8; a copy needs to know no dtype of a byte.
        raw = local.view(torch.uint8) if local.dtype.itemsize == 1 else local
        given = _filled(raw, leg.dim, most)
        gathered = [torch.empty_like(given) for _ in members]
        dist.all_gather(gathered, given, group=group)
        parts = [
            gathered[number].narrow(leg.dim, 0, length)
            for number, length in zip(numbers, lengths, strict=True)
        ]
        return torch.cat(parts, leg.dim).view(local.dtype)
    split = zip(numbers, local.split(lengths, leg.dim), strict=True)
    by_number = [
        _filled(part, leg.dim, most) for _, part in sorted(split, key=lambda item: item[0])
    ]
    own = lengths[members.index(dist.get_rank())]
    result = torch.empty_like(by_number[0])
    dist.reduce_scatter(result, by_number, _OPS[leg.op], group)
    result = result.narrow(leg.dim, 0, own).contiguous()
    return result if leg.factor == 1 else result * leg.factor


def _members(leg: Collective) -> list[int]:
    """The ranks that act together with this one, in the order of the axes."""
    mesh = leg.src.mesh
    mine = mesh.coordinate(dist.get_rank())
    assert mine is not None
    members = []
    for member in mesh.along(leg.axes, mine):
        assert isinstance(member, int)
        members.append(member)
    return members


def _filled(part: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """A contiguous part of `length` along `dim`: what it has too little is not looked at."""
    missing = length - part.shape[dim]
    if missing:
        shape = [*part.shape[:dim], missing, *part.shape[dim + 1 :]]
        part = torch.cat([part, part.new_zeros(shape)], dim)
    return part.contiguous()
