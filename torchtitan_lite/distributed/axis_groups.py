"""Process groups of this rank's axes, created once each.

`init_device_mesh` would create a group for every axis of every mesh, also for those of size 1, and
each gloo group has threads that wake a hundred times a second.
"""

import gc
import math
import weakref
from collections.abc import Hashable
from datetime import timedelta
from functools import cache
from threading import Lock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.distributed.network import cut_connections
from torchtitan_lite.distributed.torch_compat import (
    MESH_CACHES,
    abort_groups,
    clear_mesh_caches,
    compile_time_ns,
    detach_mesh,
    flatten_axes,
    lru_caches,
    mesh_group_names,
    new_local_group,
    reset_group_names,
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
        mesh = DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=axes)
        _prepare_caches(mesh, (kind, shape, axes))
        return mesh

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
        _prepare_caches(
            flat, (flat.device_type, tuple(mesh.shape), mesh.mesh_dim_names, axes, name)
        )
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
    """Destroy all process groups of this process, unless they were aborted or could not be
    created."""
    with _leaving:
        if dist.is_initialized():
            dist.destroy_process_group()
        reset_group_names()
        _groups.cache_clear()
        while _meshes:
            mesh = _meshes.pop()()
            if mesh is not None:
                detach_mesh(mesh)


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
    another world.

    What DTensor has derived for its operations is kept for equal meshes of that world, because
    deriving it takes seconds.
    """
    leave_groups()
    for function in lru_caches("torch.distributed.", "torchtitan_lite."):
        # Some of these caches have a group or a mesh as their key.
        if not function.__module__.startswith(MESH_CACHES):
            function.cache_clear()
    if compile_time_ns():
        clear_mesh_caches()
    gc.collect()


def _prepare_caches(mesh: DeviceMesh, key: Hashable) -> None:
    """Record a new mesh, equal to all others with its `key`. Clear the caches of DTensor if they
    may hold an equal mesh of an earlier world in which this process had another rank, or the
    process groups other names."""
    names = (str(dist.get_rank()), *mesh_group_names(mesh))
    if _names_by_mesh.setdefault(key, names) != names:
        clear_mesh_caches()
        _names_by_mesh.clear()
        _names_by_mesh[key] = names
    _meshes.append(weakref.ref(mesh))


_leaving = Lock()
_meshes: list[weakref.ref[DeviceMesh]] = []
"""Meshes of the present world."""
_names_by_mesh: dict[Hashable, tuple[str, ...]] = {}
"""Rank, and names of the groups, in each mesh, by what equal meshes have in common."""
