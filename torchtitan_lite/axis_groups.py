"""Process groups of this rank's axes, created once each.

`init_device_mesh` would create a group for every axis of every mesh, also for those of size 1, and
each gloo group has threads that wake a hundred times a second. Layer: above torch_compat.
"""

import gc
import math
from datetime import timedelta
from functools import _lru_cache_wrapper, cache
from threading import Lock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.network import cut_connections
from torchtitan_lite.torch_compat import (
    abort_groups,
    clear_mesh_caches,
    flatten_axes,
    new_local_group,
    set_group_timeout,
)


class AxisGroups:
    """Creates the groups of this rank, and records their axes."""

    def __init__(self, timeout: timedelta) -> None:
        """`timeout` is the timeout of the groups until `set_timeout`."""
        world = dist.group.WORLD
        assert world is not None
        self._world = world
        self._timeout = timeout
        self._names: dict[dist.ProcessGroup, str] = {}

    def device_mesh(self, kind: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
        """Return a mesh of `axes` of all ranks in order, on devices of `kind`. Every rank must call
        it."""
        ranks = torch.arange(math.prod(shape)).view(shape)
        groups = [self._over(ranks, axes, (axis,)) for axis in axes]
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=axes)

    def over(self, mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one along `axes` of a mesh of all
        ranks, in the order of the mesh. Its ranks must call it together."""
        return self._over(mesh.mesh, mesh.mesh_dim_names or (), axes)

    def flattened(self, mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
        """Return several axes of a mesh flattened to one axis `name`, whose root is still the mesh.
        Every rank must call it."""
        flat = flatten_axes(mesh, axes, name)
        group = flat.get_group()
        if group not in self._names and group != self._world:
            self._names[group] = "+".join(axes)
            set_group_timeout(group, self._timeout)
        return flat

    def name_of(self, group: dist.ProcessGroup) -> str | None:
        """Return the axes of a group; None for the world and for groups created elsewhere."""
        return self._names.get(group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the timeout of every group, including future ones."""
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
        if axes == ("expert_shard",):
            # FSDP2 accepts one mesh per process group, so experts do not share a group with
            # `dp_shard`, even if each has one rank.
            name = "expert_shard"
        members = ranks[tuple(index)].flatten().tolist()
        if len(members) == self._world.size():
            return self._world
        group = group_of_ranks(self._world, self._timeout, *members, axis=name)
        # It may have been created for another mesh.
        set_group_timeout(group, self._timeout)
        self._names[group] = name
        return group


def group_of_ranks(
    world: dist.ProcessGroup, timeout: timedelta, *ranks: int, axis: str = ""
) -> dist.ProcessGroup:
    """Return the group of `ranks`, for an axis or for none, the same for every mesh of this world;
    `timeout` is the timeout of a new group.

    A group of a single rank serves all axes but `expert_shard`. Only its own ranks need to call.
    Axes do not share a group, so that their collectives may run concurrently, unless they span all
    ranks.
    """
    made = _groups(world)
    if (ranks, axis) not in made:
        made[ranks, axis] = new_local_group(ranks, timeout, axis)
    return made[ranks, axis]


@cache
def _groups(world: dist.ProcessGroup) -> dict[tuple[tuple[int, ...], str], dist.ProcessGroup]:
    """Groups created by this rank in a world, by ranks and axis."""
    return {}


def leave_groups() -> None:
    """Destroy all process groups of this process, unless they were aborted."""
    with _leaving:
        if dist.is_initialized():
            dist.destroy_process_group()
        _groups.cache_clear()


def abort_all_groups() -> None:
    """Abort the process groups of this process, and cut its TCP connections, so that every
    collective and every look-up in a store fails that it waits in. Any thread may call it.

    A connection to a storage or a metrics service is cut as well; its client opens another one.
    """
    with _leaving:
        if dist.is_initialized():
            abort_groups()
        _groups.cache_clear()
    cut_connections()


def forget_groups() -> None:
    """Free what refers to process groups that were left or aborted, so that this process can join
    another world."""
    leave_groups()
    clear_mesh_caches()
    for found in gc.get_objects():
        # Some of these caches have a group or a mesh as their key.
        if type(found) is _lru_cache_wrapper and (found.__module__ or "").startswith(_CACHING):
            found.cache_clear()
    gc.collect()


_leaving = Lock()
_CACHING = ("torch.distributed.", "torchtitan_lite.")
