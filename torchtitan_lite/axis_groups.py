"""The process groups of this rank's axes, made once each.

`init_device_mesh` would make a group for every axis of every mesh, also for those of size 1, and
each group of gloo has threads that wake a hundred times a second. Layer: above torch_compat.
"""

import math
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.torch_compat import flatten_axes, new_local_group, set_group_timeout


class AxisGroups:
    """Makes the groups of this rank, and remembers which axes they are for."""

    def __init__(self, timeout: timedelta) -> None:
        """`timeout` is that of the groups until `set_timeout`."""
        world = dist.group.WORLD
        assert world is not None
        self._world = world
        self._timeout = timeout
        self._names: dict[dist.ProcessGroup, str] = {}

    def device_mesh(self, kind: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
        """All ranks in order as a mesh of `axes`, on devices of `kind`. Every rank must call it."""
        ranks = torch.arange(math.prod(shape)).view(shape)
        groups = [self._over(ranks, axes, (axis,)) for axis in axes]
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=axes)

    def over(self, mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one along `axes` of a mesh of all ranks, in
        the order of the mesh. Its ranks must call it together."""
        return self._over(mesh.mesh, mesh.mesh_dim_names or (), axes)

    def flattened(self, mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
        """Several axes of a mesh as one that is called `name`, whose root is still the mesh. Every
        rank must call it."""
        flat = flatten_axes(mesh, axes, name)
        group = flat.get_group()
        if group not in self._names and group != self._world:
            self._names[group] = "+".join(axes)
            set_group_timeout(group, self._timeout)
        return flat

    def name_of(self, group: dist.ProcessGroup) -> str | None:
        """The axes that a group is for; None for the world and for groups of others' making."""
        return self._names.get(group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of the collectives of every group, those to come included."""
        self._timeout = timeout
        for group in (self._world, *self._names):
            set_group_timeout(group, timeout)

    def _over(
        self, ranks: torch.Tensor, names: tuple[str, ...], axes: tuple[str, ...]
    ) -> dist.ProcessGroup:
        (place,) = (ranks == dist.get_rank()).nonzero().tolist()
        inside = [name in axes for name in names]
        index = [slice(None) if free else at for free, at in zip(inside, place, strict=True)]
        long = [name for name, size in zip(names, ranks.shape, strict=True) if size > 1]
        name = "+".join(axis for axis in axes if axis in long)
        members = ranks[tuple(index)].flatten().tolist()
        if len(members) == self._world.size():
            return self._world
        group = group_of_ranks(self._world, self._timeout, *members, axis=name)
        # It may have been made for another mesh.
        set_group_timeout(group, self._timeout)
        self._names[group] = name
        return group


def group_of_ranks(
    world: dist.ProcessGroup, timeout: timedelta, *ranks: int, axis: str = ""
) -> dist.ProcessGroup:
    """The group of `ranks`, for an axis or for none, the same for every mesh of this world;
    `timeout` is that of a group that is made.

    One of a single rank serves all axes. Only its own ranks come to it. Axes do not share one, so
    that their collectives may run at once, unless they span all ranks.
    """
    made = _groups(world)
    if (ranks, axis) not in made:
        made[ranks, axis] = new_local_group(ranks, timeout, axis)
    return made[ranks, axis]


@cache
def _groups(world: dist.ProcessGroup) -> dict[tuple[tuple[int, ...], str], dist.ProcessGroup]:
    """By ranks and axis, the groups that this rank has made in a world."""
    return {}
