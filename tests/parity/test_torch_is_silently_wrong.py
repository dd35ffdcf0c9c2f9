"""Redistributions in which torch 2.13 silently returns a wrong tensor, and ours is right.

If a case fails because torch is fixed, delete it.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.harness.ranks import WorkerPool
from tests.redistribution.processes import moved
from tests.redistribution.reference import elements_of
from torchtitan_lite.distributed.redistribute import Layout
from torchtitan_lite.distributed.torch_compat import flatten_axes, strided_shard

Pools = Callable[[int], WorkerPool]

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def test_a_strided_shard_without_an_equal_shard_order(pools: Pools) -> None:
    # torch gathers the rows as if the strided shard were a Shard.
    pools(4).run(_compare, (8, 8), [strided_shard(0, 2), S1], [R, S0])


def test_uneven_strided_shards(pools: Pools) -> None:
    pools(4).run(_compare, (7, 5), [R, strided_shard(0, 3)], [strided_shard(0, 2), S0])


def test_uneven_shards_of_flattened_axes(pools: Pools) -> None:
    # With a flattened axis, torch gathers both at once, as if they were one split into four.
    pools(4).run(_compare_flattened, (7, 5), [S1, S1], [R, R])


def _compare(
    shape: tuple[int, ...],
    src: Sequence[Placement],
    dst: Sequence[Placement],
    mesh: DeviceMesh | None = None,
) -> None:
    """torch is wrong on at least one rank, and ours is right on all ranks."""
    mesh = mesh or init_device_mesh("cpu", (2, 2))
    source, target = Layout.from_device_mesh(mesh, src), Layout.from_device_mesh(mesh, dst)
    local = _shard(source, shape)
    tensor = DTensor.from_local(
        local, mesh, src, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    expected = _shard(target, shape)
    ours = moved(tensor, target, strided="stride").to_local()
    assert torch.equal(ours, expected)
    theirs = tensor.redistribute(placements=dst).to_local()
    right = torch.tensor(int(torch.equal(theirs, expected)))
    dist.all_reduce(right)
    assert right < dist.get_world_size()


def _compare_flattened(
    shape: tuple[int, ...], src: Sequence[Placement], dst: Sequence[Placement]
) -> None:
    # With unique names, because a mesh caches flattened axes.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("once", "twice"))
    flatten_axes(mesh, ("once", "twice"), "both")
    _compare(shape, src, dst, mesh)


def _shard(layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    at = layout.mesh.coordinate(dist.get_rank())
    assert at is not None
    whole = torch.arange(1.0, 1.0 + math.prod(shape))
    return whole[torch.from_numpy(elements_of(layout, shape, at))]
