"""Process groups of the axes: created once, with their timeouts and names, and left for others."""

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import _lru_cache_wrapper
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor import debug as dtensor_debug

from tests.harness.ranks import FORK_SERVER, GLOO_TIMEOUT_S, WorkerPool
from tests.harness.threads import run_on_threads
from torchtitan_lite.distributed import axis_groups, torch_compat
from torchtitan_lite.distributed.axis_groups import AxisGroups, abort_all_groups, forget_groups
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.distributed.torch_compat import lru_caches


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


def derived_in_world(rank: int, store: str) -> int:
    """Join a world of two ranks, compute with a tensor sharded over `tp`, abort the groups, and
    return how often DTensor derived the sharding of an operation."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    derive, count = propagator._propagate_tensor_meta_non_cached, 0

    def counted(schema: object) -> object:
        nonlocal count
        count += 1
        return derive(schema)

    propagator._propagate_tensor_meta_non_cached = counted
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = AxisGroups(timedelta(seconds=30)).device_mesh("cpu", (1, 2), ("dp", "tp"))
    weight_VD = torch.arange(24, dtype=torch.float64).view(4, 6)
    sharded_VD = distribute_tensor(weight_VD, mesh, [Replicate(), Shard(1)])
    local_VD = sharded_VD.to_local()
    assert torch.equal(local_VD, weight_VD.chunk(2, dim=1)[rank])
    product: Any = sharded_VD @ sharded_VD.t()
    product_VV = product.full_tensor()
    assert torch.equal(product_VV, weight_VD @ weight_VD.t())
    group = weakref.ref(mesh.get_group("tp"))
    del mesh, sharded_VD, local_VD, product, product_VV
    abort_all_groups()
    forget_groups()
    assert group() is None, "a cache keeps a process group"
    propagator._propagate_tensor_meta_non_cached = derive
    return count


def consecutive_worlds(rank: int, folder: str) -> None:
    """Take part in three worlds, in the last with the ranks exchanged."""
    assert derived_in_world(rank, f"{folder}/0") > 0
    assert derived_in_world(rank, f"{folder}/1") == 0
    assert derived_in_world(1 - rank, f"{folder}/2") > 0


def join_after_a_failure(rank: int, folder: str) -> None:
    """Join a world of two ranks; rank 0 after it has waited in vain for another one."""
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/lonely", rank=0, world_size=2,
                timeout=timedelta(seconds=0.5),
            )  # fmt: skip
        forget_groups()
    timeout = timedelta(seconds=30)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/both", rank=rank, world_size=2, timeout=timeout
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()


@pytest.mark.parametrize("of_rank", [consecutive_worlds, join_after_a_failure])
def test_processes_join_another_world(
    of_rank: Callable[[int, str], None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In the first case, an equal world reuses what was derived, and another does not."""
    folder = tmp_path_factory.mktemp("stores")
    processes = [FORK_SERVER.Process(target=of_rank, args=(rank, str(folder))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


class RenamedMesh:
    """Mesh of a torch that keeps the groups in other attributes."""

    group_names = ("dp", "tp")


def test_caches_are_cleared_if_the_groups_of_a_mesh_are_kept_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleared: list[str] = []
    monkeypatch.setattr(axis_groups, "clear_mesh_caches", lambda: cleared.append("new mesh"))
    monkeypatch.setattr(torch_compat, "clear_mesh_caches", lambda: cleared.append("old mesh"))
    monkeypatch.setattr(axis_groups, "_names_by_mesh", {})
    monkeypatch.setattr(axis_groups, "_meshes", [])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    meshes: list[Any] = [RenamedMesh(), RenamedMesh()]
    axis_groups._prepare_caches(meshes[0], "key")
    assert cleared == []
    axis_groups._prepare_caches(meshes[1], "key")
    assert cleared == ["new mesh"]
    axis_groups.leave_groups()
    assert cleared == ["new mesh", "old mesh", "old mesh"]


def test_all_caches_that_may_hold_a_group_are_found() -> None:
    prefixes = ("torch.distributed.", "torchtitan_lite.")
    found = {id(one) for one in lru_caches(*prefixes)}
    # Those of modules that the tests have imported were frozen.
    gc.unfreeze()
    caches = [one for one in gc.get_objects() if type(one) is _lru_cache_wrapper]
    gc.freeze()
    missing = {
        f"{one.__module__}.{one.__qualname__}"
        for one in caches
        if id(one) not in found and (one.__module__ or "").startswith(prefixes)
    }
    # The cache of sharding propagation has its own function to clear it.
    assert {name for name in missing if "propagate_op_sharding" not in name} == set()


def test_the_shards_of_experts_have_a_group_of_their_own() -> None:
    def names() -> tuple[str | None, bool]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(tp=2, ep=2))
        shards = mesh.expert_mesh.get_group("expert_shard")
        others = (mesh.device_mesh.get_group("dp_shard"), mesh.expert_mesh.get_group("etp"))
        return mesh.groups.name_of(shards), shards in others

    assert run_on_threads(2, names) == [("expert_shard", False)] * 2


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which caches are cleared."""
    names: list[str] = []

    def cache(name: str) -> Any:
        return SimpleNamespace(
            cache_clear=lambda: names.append(name), __module__="torchtitan_lite.x"
        )

    monkeypatch.setattr(
        dtensor_debug, "_clear_sharding_prop_cache", lambda: names.append("propagation")
    )
    monkeypatch.setattr(
        _redistribute, "clear_redistribute_planner_cache", lambda: names.append("planner")
    )
    for module in (torch_compat, axis_groups):
        monkeypatch.setattr(module, "lru_caches", lambda *prefixes: iter([cache("function")]))
    return names


def test_all_caches_of_dtensor_are_cleared(cleared: list[str]) -> None:
    torch_compat.clear_mesh_caches()
    assert cleared == ["propagation", "planner", "function"]


@pytest.mark.parametrize("has_compiled", [False, True])
def test_compiled_code_keeps_no_mesh_of_a_former_world(
    cleared: list[str], monkeypatch: pytest.MonkeyPatch, has_compiled: bool
) -> None:
    monkeypatch.setattr(axis_groups, "leave_groups", lambda: None)
    monkeypatch.setattr(axis_groups, "compile_time_ns", lambda: int(has_compiled))
    monkeypatch.setattr(axis_groups, "clear_mesh_caches", lambda: cleared.append("meshes"))
    forget_groups()
    assert cleared == ["function", "meshes"][: 1 + has_compiled]


@pytest.mark.parametrize("end", [axis_groups.leave_groups, abort_all_groups])
def test_groups_of_a_former_world_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]
) -> None:
    monkeypatch.setattr(axis_groups, "_meshes", [])
    monkeypatch.setattr(axis_groups, "cut_connections", lambda: None)
    world: Any = object()
    axis_groups._groups(world)[(0,), ""] = world
    end()
    assert axis_groups._groups(world) == {}
    axis_groups._groups.cache_clear()


def test_the_groups_of_the_next_world_have_the_names_of_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed_c10d._world, "group_count", 5)
    torch_compat.reset_group_names()
    assert distributed_c10d._world.group_count == 0


def test_a_mesh_of_a_former_world_refers_to_no_group() -> None:
    mesh: Any = SimpleNamespace(_pg_registry={"dp": object()})
    torch_compat.detach_mesh(mesh)
    assert mesh._pg_registry == {}


def test_once_caches_are_cleared_only_new_meshes_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(axis_groups, "clear_mesh_caches", lambda: None)
    monkeypatch.setattr(axis_groups, "_names_by_mesh", {})
    monkeypatch.setattr(axis_groups, "_meshes", [])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    mesh: Any = RenamedMesh()
    for key in ("one", "other", "one"):
        axis_groups._prepare_caches(mesh, key)
    assert set(axis_groups._names_by_mesh) == {"one"}


def test_plans_of_a_fake_world_are_not_kept(
    cleared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache(name: str) -> Any:
        return SimpleNamespace(cache_clear=lambda: cleared.append(name))

    propagator = DTensor._op_dispatcher.sharding_propagator
    monkeypatch.setattr(propagator, "propagate_op_sharding", cache("operations"))
    monkeypatch.setattr(_redistribute, "_gen_transform_infos", cache("transforms"))
    monkeypatch.setattr(
        torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: cleared.append("in C++")
    )
    with torch_compat.fake_process_group(1, 2):
        assert (dist.get_rank(), cleared) == (1, [])
    assert sorted(cleared) == ["in C++", "operations", "planner", "transforms"]
