"""Moves any number of tensors in one exchange. Layer: above execution and axis_groups."""

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchtitan_lite.axis_groups import group_of_ranks
from torchtitan_lite.errors import LayoutError, RedistributionError
from torchtitan_lite.redistribute.execution import Execution
from torchtitan_lite.redistribute.holder_mesh import HolderMesh
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.means import Means
from torchtitan_lite.redistribute.plan import Plan
from torchtitan_lite.redistribute.program import Task
from torchtitan_lite.redistribute.strided import decode_strided
from torchtitan_lite.redistribute.words import word_bytes
from torchtitan_lite.torch_compat import DTensorSpec

_GROUP_TIMEOUT = timedelta(minutes=5)


def move(
    plans: Sequence[Plan],
    sources: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor | None],
    device: torch.device,
    means: Means,
) -> list[torch.Tensor]:
    """This rank's parts of the destinations, given its parts of the sources, in the order of
    `plans`, which is the same on all ranks. What is given in `outs` is filled; else a part that
    stays as it is may be the source itself. A rank that holds nothing gets empty tensors.

    Every rank of the plans must call it; others return at once.
    Raises LayoutError for a source whose part has another shape than its layout says, and
    RedistributionError for an `out` that does not fit.
    """
    rank = dist.get_rank()
    plans = tuple(plans)
    work = _work(plans, rank)
    results: list[torch.Tensor] = []
    for plan, source, shape in zip(plans, sources, work.source_shapes, strict=True):
        if source is not None and shape is not None:
            check_source(plan, source, shape)
    for plan, stays, shape, source, out in zip(
        plans, work.stays, work.shapes, sources, outs, strict=True
    ):
        if out is not None and plan.dst.mesh.place(rank) is not None:
            _check_part(out, shape, plan)
        if stays and source is not None:
            results.append(source if out is None else out)
            if out is not None and out.data_ptr() != source.data_ptr():
                out.copy_(source)
        elif out is None:
            results.append(torch.empty(shape, dtype=plan.dtype, device=device))
        else:
            if source is not None and out.numel() and out.data_ptr() == source.data_ptr():
                raise RedistributionError(
                    f"out is the source itself, which is read while {plan.dst} is written. Give "
                    "other memory."
                )
            results.append(out)
    for chosen, indices, ranks in work.exchanges:
        _execution(chosen, ranks, device, means, dist.group.WORLD).run(
            [_part(sources[n], plans[n].src, rank) for n in indices],
            [None if plans[n].dst.mesh.place(rank) is None else results[n] for n in indices],
        )
    return results


def check_source(plan: Plan, part: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise LayoutError if this rank's part of the source has another shape than the layout
    says."""
    if part.shape != shape:
        raise LayoutError(
            f"Rank {dist.get_rank()} has a part of shape {tuple(part.shape)}, and {plan.src} of a "
            f"tensor of shape {plan.shape} gives it {shape}. Make the DTensor with the shape of "
            "the whole tensor, or say how its strided shards are read."
        )


class _Work(NamedTuple):
    """What a rank has to do for some plans."""

    stays: list[bool]
    shapes: list[tuple[int, ...]]
    """Of its parts of the destinations."""
    source_shapes: list[tuple[int, ...] | None]
    """None where it has no part of the source."""
    exchanges: list[tuple[tuple[Plan, ...], list[int], tuple[int, ...]]]
    """In which it takes part: the plans, their places among all, and the ranks."""


@lru_cache(maxsize=256)
def _work(plans: tuple[Plan, ...], rank: int) -> _Work:
    stays = [plan.stays(rank) for plan in plans]
    near = [n for n, plan in enumerate(plans) if plan.moved_bytes == 0 and not stays[n]]
    far = [n for n, plan in enumerate(plans) if plan.moved_bytes > 0]
    exchanges = []
    for indices, ranks in ((near, (rank,)), (far, _ranks([plans[n] for n in far]))):
        if indices and rank in ranks:
            exchanges.append((tuple(plans[n] for n in indices), indices, ranks))
    source_shapes = [
        None if plan.src.mesh.place(rank) is None else plan.src.local_shape(plan.shape, rank)
        for plan in plans
    ]
    return _Work(stays, [plan.local_shape(rank) for plan in plans], source_shapes, exchanges)


def _part(tensor: torch.Tensor | None, layout: Layout, rank: int) -> torch.Tensor | None:
    """A part as memory whose bytes are its elements; its strides may be any."""
    if tensor is None or layout.mesh.place(rank) is None:
        return None
    return tensor.resolve_conj().resolve_neg()


@lru_cache(maxsize=8192)
def check_out(
    given: DTensorSpec, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise RedistributionError where a DTensor that is `given` for a result lies otherwise than
    `layout`, or has another shape or dtype."""
    meta = given.tensor_meta
    assert meta is not None
    readings = [Layout.from_spec(given, strided="stride")]
    if decode_strided(readings[0].mesh, readings[0].placements) is not None:
        readings.append(Layout.from_spec(given, strided="order"))
    lies_so = layout in readings
    if not lies_so or tuple(meta.shape) != shape or meta.dtype != dtype:
        raise RedistributionError(
            f"out is {given.placements} on {HolderMesh.of(given.mesh)}, of shape "
            f"{tuple(meta.shape)}, {meta.dtype}; {layout}, {shape}, {dtype} is needed."
        )


def _check_part(out: torch.Tensor, shape: tuple[int, ...], plan: Plan) -> None:
    if tuple(out.shape) != shape or out.dtype != plan.dtype or not out.is_contiguous():
        raise RedistributionError(
            f"out has a part of shape {tuple(out.shape)}, {out.dtype}"
            f"{'' if out.is_contiguous() else ', not contiguous'}; {plan.dst} of a tensor of shape "
            f"{plan.shape} needs {shape}, {plan.dtype}, contiguous."
        )


def _ranks(plans: Sequence[Plan]) -> tuple[int, ...]:
    """All that take part, in order."""
    meshes = {mesh for plan in plans for mesh in (plan.src.mesh, plan.dst.mesh)}
    ranks: set[int] = set()
    for mesh in meshes:
        for holder in mesh.holders:
            if not isinstance(holder, int):
                raise RedistributionError(
                    f"Holder {holder!r} of {mesh} is no rank; only ranks can be moved between here."
                )
            ranks.add(holder)
    return tuple(sorted(ranks))


@lru_cache(maxsize=64)
def _execution(
    plans: tuple[Plan, ...],
    ranks: tuple[int, ...],
    device: torch.device,
    means: Means,
    world: dist.ProcessGroup,
) -> Execution:
    width = word_bytes(plan.dtype for plan in plans)
    tasks = [Task(plan, dist.get_rank(), width) for plan in plans]
    return Execution(tasks, ranks, group_of(ranks) if len(ranks) > 1 else None, device, means)


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of some ranks, made at its first use, to which all of them must come."""
    world = dist.group.WORLD
    assert world is not None
    ranks = sorted(ranks)
    if len(ranks) == world.size():
        return world
    return group_of_ranks(world, _GROUP_TIMEOUT, *ranks)
