"""Prediction of what `DTensor.redistribute` would do instead of a plan, on CPUs with gloo.

Nothing is moved: DTensor runs on tensors without data in a fake process group, and its collectives
are recorded. If strided shards make its result doubtful, a small tensor with data is redistributed
too, all ranks in this process.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from scripts.reshard_explanation import format_bytes
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, Plan
from torchtitan_lite.distributed.redistribute.planning.partition import intervals
from torchtitan_lite.distributed.torch_compat import (
    Operations,
    fake_process_group,
    group_of,
    is_strided_shard,
    redistribute_on_all_ranks,
    redistribution_steps,
    tensors_in,
)

_MAX_CHECKED = 1 << 24
"""Maximum number of elements, over all ranks, for which values are checked."""

# DTensor raises any of these if it does not support a redistribution.
_REFUSALS = (RuntimeError, NotImplementedError, ValueError, AssertionError)

# It raises only if the placements differ (2.13).
_ANOTHER_MESH = "for equal placements on another mesh, it returns the tensor on its old mesh"


@dataclass(frozen=True, kw_only=True)
class DTensorPrediction:
    """Redistribution by DTensor. Created by `predict_dtensor`."""

    unsupported_reason: str | None = None
    """The reason why it does not support the redistribution, in its own words if it gives any."""
    steps: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    sent: dict[int, int] | None = None
    """Bytes that each rank sends, and also receives."""
    is_correct: bool | None = None
    """Whether every rank gets its boxes; None if that was not checked."""


def predict_dtensor(plan: Plan) -> DTensorPrediction:
    """Return what `DTensor.redistribute` would do. The process must have no process group."""
    ranks = _ranks(plan.src)
    sent: dict[int, int] = {}
    steps: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    with _quiet():
        for rank in ranks:
            try:
                result = _as_rank(plan, rank)
            except _REFUSALS as error:
                # torch's assertions without a message have a generic one.
                message = str(error).partition("\n")[0].partition(" (Could this")[0]
                return DTensorPrediction(unsupported_reason=message or type(error).__name__)
            sent[rank] = result[2]
            if rank == ranks[0]:
                steps, collectives = result[:2]
        is_correct = _is_correct(plan)
    return DTensorPrediction(steps=steps, collectives=collectives, sent=sent, is_correct=is_correct)


def describe_dtensor(way: DTensorPrediction, plan: Plan) -> list[str]:
    """Describe it in lines of text."""
    lines = ["", "DTensor.redistribute on gloo, instead:"]
    if way.unsupported_reason is not None:
        return [*lines, f"  not supported: {way.unsupported_reason}"]
    lines.append(f"  steps: {'; '.join(way.steps) or 'none'}")
    lines += [f"  {collective}" for collective in way.collectives]
    sent = way.sent or {}
    total, most = sum(sent.values()), max(sent.values())
    compared = ""
    if total == plan.moved_bytes:
        compared = ", the same"
    elif plan.moved_bytes:
        compared = f", {total / plan.moved_bytes:.3g} times the bytes of the plan"
    elif total:
        compared = ", and the plan moves none"
    lines.append(
        f"  moved in total: {total:,} bytes ({format_bytes(total)}){compared}; at most "
        f"{format_bytes(most)} sent and received per rank"
    )
    if way.is_correct is not None:
        lines.append(
            "  checked with data: every rank gets its part"
            if way.is_correct
            else "  WRONG: checked with data, some ranks do not get their part"
        )
    elif _is_doubtful(plan):
        lines.append("  not checked with data, though strided shards go wrong in some cases")
    return lines


def _as_rank(plan: Plan, rank: int) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return the steps, the collectives, and the bytes sent."""
    world_size = max(_ranks(plan.src) + _ranks(plan.dst)) + 1
    with fake_process_group(rank, world_size):
        source = _device_mesh(plan.src.mesh)
        shape = plan.src.local_shape(plan.shape, rank)
        local = torch.empty(shape, dtype=plan.dtype, device="meta")
        tensor = plan.src.to_dtensor(local, source, plan.shape)
        target = source if plan.dst.mesh == plan.src.mesh else _device_mesh(plan.dst.mesh)
        axes = {source.get_group(axis).group_name: axis for axis in range(source.ndim)}
        collectives: list[str] = []
        sent = 0

        def run(operation: Any, args: Sequence[Any], kwargs: Any) -> Any:
            nonlocal sent
            group = group_of(operation, args, kwargs)
            if group is not None:
                name = operation._schema.name.rpartition("::")[2]
                count = _sent(name, tensors_in(args)[0].nbytes, group.size())
                sent += count
                axis = plan.src.mesh.axes[axes[group.group_name]]
                collectives.append(
                    f"{name} over {axis} ({group.size()} ranks): "
                    f"{format_bytes(count)} sent by a rank"
                )
            return operation(*args, **kwargs)

        with Operations(run):
            moved = tensor.redistribute(target, plan.dst.dtensor_placements)
        if moved.device_mesh != target:
            raise NotImplementedError(_ANOTHER_MESH)
        return tuple(_steps(tensor, plan.dst)), tuple(collectives), sent


def _ranks(layout: Layout) -> list[int]:
    return [holder for holder in layout.mesh.holders if isinstance(holder, int)]


def _steps(tensor: DTensor, dst: Layout) -> Iterator[str]:
    for axis, source, target in redistribution_steps(tensor, dst.dtensor_placements):
        yield f"{dst.mesh.axes[axis]}: {source} to {target}"


def _sent(name: str, given_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends in a collective with the given number of bytes."""
    num_peers = num_ranks - 1
    if name == "all_gather_into_tensor":
        return given_bytes * num_peers
    if name in ("all_reduce", "reduce_scatter_tensor"):
        # gloo all-reduces and keeps a part: 1.50 times the bytes, measured with 4 ranks.
        return 2 * given_bytes * num_peers // num_ranks
    if name == "wait_tensor":
        return 0
    raise NotImplementedError(f"The bytes of {name} are not known")


def _is_doubtful(plan: Plan) -> bool:
    return any(
        is_strided_shard(placement)
        for layout in (plan.src, plan.dst)
        for placement in layout.dtensor_placements
    )


def _is_correct(plan: Plan) -> bool | None:
    src, dst = plan.src, plan.dst
    num_ranks, size = len(src.mesh.holders), prod(plan.shape)
    partial = any(isinstance(p, Partial) for p in (*src.placements, *dst.placements))
    if src.mesh != dst.mesh or not _is_doubtful(plan) or partial:
        return None
    if size * num_ranks > _MAX_CHECKED:
        return None
    whole = torch.arange(size, dtype=torch.int32).reshape(plan.shape)
    sources = [_part(whole, src, holder) for holder in src.mesh.holders]
    with fake_process_group(0, num_ranks):
        try:
            moved = redistribute_on_all_ranks(
                sources,
                src.mesh.shape,
                plan.shape,
                src.dtensor_placements,
                dst.dtensor_placements,
            )
        except _REFUSALS:
            return False
    return all(
        part.shape == expected.shape and torch.equal(part, expected)
        for part, expected in zip(
            moved, (_part(whole, dst, holder) for holder in src.mesh.holders), strict=True
        )
    )


def _part(whole: torch.Tensor, layout: Layout, holder: Any) -> torch.Tensor:
    coordinate = layout.mesh.coordinate(holder)
    assert coordinate is not None
    for dim, length in enumerate(whole.shape):
        ranges = intervals(length, layout.splits.get(dim, ()), layout.shard_index(dim, coordinate))
        index = [at for start, count in ranges for at in range(start, start + count)]
        whole = whole.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return whole


def _device_mesh(mesh: HolderMesh) -> DeviceMesh:
    ranks = torch.tensor(mesh.holders).reshape(mesh.shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.axes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress DTensor's warnings about its slow paths, which the output describes anyway."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
