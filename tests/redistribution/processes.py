"""Redistribution on real processes: sources, expected results, and moves checked to the bit.

Every rank computes all contributions. Runs in the workers of a pool.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from tests.redistribution.reference import averaged, contribution_keys, elements_of, key_of
from torchtitan_lite.distributed.redistribute import (
    ExchangeOptions,
    HolderMesh,
    Layout,
    redistribute_state_dict,
)
from torchtitan_lite.distributed.redistribute.planning.cost import DEFAULT_OPTIONS
from torchtitan_lite.distributed.redistribute.planning.placements import StridedReading
from torchtitan_lite.distributed.torch_compat import is_strided_shard


class Move(NamedTuple):
    """A tensor, its source layout and its destination layout."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@cache
def device_mesh(mesh: HolderMesh) -> DeviceMesh:
    """Collective: every rank must call it, in the same order."""
    return DeviceMesh("cpu", torch.tensor(mesh.holders).reshape(mesh.shape))


def reading(layout: Layout) -> StridedReading:
    """The interpretation of the strided shards of `layout.to_dtensor`."""
    return "stride" if any(map(is_strided_shard, layout.placements)) else "order"


def source(move: Move, seed: int) -> DTensor:
    """The source on this rank; empty outside of its mesh."""
    contributions, rank = _contributions(move, seed), dist.get_rank()
    at = move.src.mesh.coordinate(rank)
    local = torch.empty(0, dtype=move.dtype)
    if at is not None:
        key = contribution_keys(move.src)[key_of(move.src, at)]
        local = _shard(contributions[key], move.src, at)
    return move.src.to_dtensor(local, device_mesh(move.src.mesh), move.shape)


def moved(
    tensor: DTensor,
    dst: Layout,
    *,
    mesh: DeviceMesh | None = None,
    strided: StridedReading | None = None,
    out: DTensor | None = None,
    options: ExchangeOptions = DEFAULT_OPTIONS,
) -> DTensor:
    """One tensor in another layout; `mesh` is that of the result if it is another one."""
    return redistribute_state_dict(
        {"tensor": tensor},
        {"tensor": dst},
        meshes=[] if mesh is None else [mesh],
        strided=strided,
        out=None if out is None else {"tensor": out},
        options=options,
    )["tensor"]


def assert_arrived(move: Move, seed: int, result: DTensor) -> None:
    """Assert that the result is right, to the bit. Collective."""
    rank, mesh = dist.get_rank(), device_mesh(move.dst.mesh)
    assert result.device_mesh == mesh and result.placements == move.dst.dtensor_placements
    assert result.shape == move.shape and result.dtype == move.dtype
    local, at = result.to_local(), move.dst.mesh.coordinate(rank)
    where = f"{move.src} -> {move.dst} of {move.shape} {move.dtype} on rank {rank}"
    if move.dst.reduce_op is not None:
        local = _reduced(local, move.dst)
    if at is None:
        # Outside of a mesh, torch returns a zero for a scalar.
        assert local.numel() == 0 or move.shape == (), where
        return
    expected = _shard(_value(move, seed), move.dst, at)
    assert local.shape == expected.shape, where
    assert torch.equal(bits(local), bits(expected)), (where, local, expected)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def one_by_one(moves: Sequence[Move], options: Sequence[ExchangeOptions]) -> None:
    """Move each tensor separately, with each of `options`."""
    for seed, move in enumerate(moves):
        for some in options:
            tensor = source(move, seed)
            result = moved(
                tensor,
                move.dst,
                mesh=device_mesh(move.dst.mesh),
                strided=reading(move.src),
                options=some,
            )
            assert_arrived(move, seed, result)
            # The source is unchanged.
            assert_arrived(Move(move.src, move.src, move.shape, move.dtype), seed, tensor)


def all_at_once(moves: Sequence[Move], options: Sequence[ExchangeOptions]) -> None:
    """Move all tensors in one exchange per interpretation of strided shards, with each option."""
    numbered = list(enumerate(moves))
    by_reading: dict[StridedReading, list[tuple[int, Move]]] = {}
    for seed, move in numbered:
        by_reading.setdefault(reading(move.src), []).append((seed, move))
    for strided, some in by_reading.items():
        tensors = {str(seed): source(move, seed) for seed, move in some}
        meshes = [device_mesh(move.dst.mesh) for _, move in some]
        for how in options:
            results = redistribute_state_dict(
                tensors,
                {str(seed): move.dst for seed, move in some},
                meshes=meshes,
                strided=strided,
                options=how,
            )
            assert list(results) == list(tensors)
            for seed, move in some:
                assert_arrived(move, seed, results[str(seed)])
    dist.barrier()


def _contributions(move: Move, seed: int) -> list[torch.Tensor]:
    """Small integers, whose sums and averages are exact in every dtype."""
    rng = np.random.default_rng(seed)
    count = len(contribution_keys(move.src))
    scale = averaged(move.src) * averaged(move.dst)
    # float8 represents every integer up to 16.
    high = 2 if move.dtype == torch.bool else max(2, 16 // (count * scale)) if count > 1 else 8
    integers = rng.integers(0, high, (count, *move.shape)) * scale
    return [torch.from_numpy(np.asarray(each)).to(move.dtype) for each in integers]


def _value(move: Move, seed: int) -> torch.Tensor:
    contributions = _contributions(move, seed)
    return _reduce(contributions, move.src.reduce_op or "sum", averaged(move.src))


def _reduced(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The reduction over all ranks that contribute to the same shard as this one."""
    # As bytes: float8 cannot be pickled.
    world: list[tuple[np.ndarray, tuple[int, ...]]] = [(np.empty(0), ())] * dist.get_world_size()
    dist.all_gather_object(world, (bits(local).numpy(), tuple(local.shape)))
    mine = layout.mesh.coordinate(dist.get_rank())
    if mine is None:
        return local
    same = []
    for rank, (held, shape) in enumerate(world):
        at = layout.mesh.coordinate(rank)
        if at is not None and all(
            ours == theirs or isinstance(placement, Partial)
            for ours, theirs, placement in zip(mine, at, layout.placements, strict=True)
        ):
            same.append(torch.from_numpy(held).view(local.dtype).reshape(shape))
    assert layout.reduce_op is not None
    return _reduce(same, layout.reduce_op, averaged(layout))


def _reduce(contributions: Sequence[torch.Tensor], op: str, averaged_over: int) -> torch.Tensor:
    dtype = contributions[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([each.to(wide) for each in contributions])
    reduced = {
        "sum": lambda: stacked.sum(0),
        "product": lambda: stacked.prod(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
    }[op]()
    return (reduced / averaged_over).to(dtype)


def _shard(whole: torch.Tensor, layout: Layout, at: tuple[int, ...]) -> torch.Tensor:
    elements = torch.from_numpy(elements_of(layout, tuple(whole.shape), at))
    # float8 cannot be indexed, but its bytes can.
    flat = whole.reshape(-1).view(torch.uint8).reshape(whole.numel(), whole.dtype.itemsize)
    if whole.numel() == 0:
        return torch.empty(elements.shape, dtype=whole.dtype)
    return flat[elements.reshape(-1)].view(whole.dtype).reshape(elements.shape)
