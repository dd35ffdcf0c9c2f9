"""Moves for which torch 2.13 gives a wrong tensor and no error, and which are right here.

When one of these fails because torch has become right, the case has done its work: drop it.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.pool import WorkerPool
from tests.redistribution.reference import elements_of
from torchtitan_lite.redistribute import Layout, redistribute
from torchtitan_lite.torch_compat import flatten_axes, strided_shard

Pools = Callable[[int], WorkerPool]

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def test_a_strided_shard_that_is_no_order(pools: Pools) -> None:
    # torch gathers the rows as if the strided shard were a Shard.
    pools(4).run(_compare, (8, 8), [strided_shard(0, 2), S1], [R, S0])


def test_uneven_strided_shards(pools: Pools) -> None:
    pools(4).run(_compare, (7, 5), [R, strided_shard(0, 3)], [strided_shard(0, 2), S0])


def test_uneven_shards_of_axes_that_were_flattened(pools: Pools) -> None:
    # With a flattened axis torch gathers both at once, as if it had cut once into four.
    pools(4).run(_compare_flattened, (7, 5), [S1, S1], [R, R])


def _compare(
    shape: tuple[int, ...],
    src: Sequence[Placement],
    dst: Sequence[Placement],
    mesh: DeviceMesh | None = None,
) -> None:
    """Torch is wrong on at least one rank, and we are right on all."""
    mesh = mesh or init_device_mesh("cpu", (2, 2))
    given, wanted = Layout.from_device_mesh(mesh, src), Layout.from_device_mesh(mesh, dst)
    local = _part(given, shape)
    tensor = DTensor.from_local(
        local, mesh, src, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    expected = _part(wanted, shape)
    ours = redistribute(tensor, wanted, strided="stride").to_local()
    assert torch.equal(ours, expected)
    theirs = tensor.redistribute(placements=dst).to_local()
    right = torch.tensor(int(torch.equal(theirs, expected)))
    dist.all_reduce(right)
    assert right < dist.get_world_size()


def _compare_flattened(
    shape: tuple[int, ...], src: Sequence[Placement], dst: Sequence[Placement]
) -> None:
    # Names of its own: a mesh remembers what was flattened.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("once", "twice"))
    flatten_axes(mesh, ("once", "twice"), "both")
    _compare(shape, src, dst, mesh)


def _part(layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    at = layout.mesh.coordinate(dist.get_rank())
    assert at is not None
    whole = torch.arange(1.0, 1.0 + math.prod(shape))
    return whole[torch.from_numpy(elements_of(layout, shape, at))]
