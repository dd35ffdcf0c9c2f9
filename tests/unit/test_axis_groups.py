"""Process groups of the axes: created once, with their timeouts and names."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.pool import GLOO_TIMEOUT_S, WorkerPool
from torchtitan_lite.axis_groups import AxisGroups
from torchtitan_lite.device import detect_device
from torchtitan_lite.mesh import Mesh, ParallelDims


def time_limits(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def groups_of_a_mesh() -> None:
    world = dist.group.WORLD
    assert world is not None
    degrees = ParallelDims(dp_shard=2, cp=2, ep=2)
    mesh = Mesh(detect_device("cpu"), degrees, timeout_s=77)
    flat = mesh.groups.flattened(mesh.device_mesh, ("dp_shard", "cp"), "dp_shard_cp")
    made = {axis: mesh.device_mesh.get_group(axis) for axis in ("dp_shard", "cp", "tp", "pp")}
    experts = {axis: mesh.expert_mesh.get_group(axis) for axis in ("expert_shard", "ep", "etp")}
    both = mesh.groups.over(mesh.expert_mesh, "ep", "etp")
    place = dist.get_rank()
    assert dist.get_process_group_ranks(made["dp_shard"]) == [place % 2, place % 2 + 2]
    assert dist.get_process_group_ranks(made["cp"]) == [place // 2 * 2, place // 2 * 2 + 1]
    assert made["tp"] is made["pp"] is experts["etp"]
    assert both is experts["ep"] and both is not made["cp"]
    assert mesh.groups.name_of(both) == "ep" and mesh.groups.name_of(made["cp"]) == "cp"
    assert mesh.groups.over(mesh.device_mesh, "dp_shard", "cp") is world
    assert mesh.groups.name_of(world) is None
    for group in (*made.values(), *experts.values()):
        assert time_limits(group) == timedelta(seconds=77)
    mesh.set_timeout(33)
    for group in (*made.values(), *experts.values(), flat.get_group(), world):
        assert time_limits(group) == timedelta(seconds=33)
    mesh.set_timeout(GLOO_TIMEOUT_S)
    again = AxisGroups(timedelta(seconds=77)).device_mesh("cpu", (2, 2), ("dp_shard", "cp"))
    assert again.get_group("cp") is made["cp"]


def test_groups_have_their_ranks_names_and_timeouts(
    pools: Callable[[int], WorkerPool],
) -> None:
    pools(4).run(groups_of_a_mesh)
