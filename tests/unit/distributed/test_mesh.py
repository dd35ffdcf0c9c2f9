"""ParallelDims, and the mesh of a single process."""

import os
from datetime import timedelta
from threading import Event
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tests.harness.threads import run_on_threads
from torchtitan_lite.config.tables.comm import CommConfig
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.distributed import mesh
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import (
    AXES,
    Mesh,
    ParallelDims,
    check_own_gpus,
    resolve_degrees,
    start_mesh,
)


@pytest.mark.parametrize(
    ("settings", "world_size", "replicate", "shard"),
    [
        ({}, 1, 1, 1),
        ({}, 6, 1, 6),
        ({"data_parallel_replicate_degree": 2}, 6, 2, 3),
        ({"data_parallel_replicate_degree": 6}, 6, 6, 1),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 3}, 6, 2, 3),
    ],
)
def test_a_degree_of_minus_one_uses_the_remaining_processes(
    settings: dict[str, Any], world_size: int, replicate: int, shard: int
) -> None:
    degrees = resolve_degrees(ParallelismConfig(**settings), world_size)
    assert degrees == ParallelDims(dp_replicate=replicate, dp_shard=shard)
    assert degrees.batch == world_size
    assert degrees.shape == (1, replicate, shard, 1, 1)


def test_degrees_with_a_wrong_product_are_rejected_with_the_full_equation() -> None:
    config = ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=4)
    with pytest.raises(MeshError) as error:
        resolve_degrees(config, 6)
    assert str(error.value) == (
        "pipeline (1) x data_parallel_replicate (2) x data_parallel_shard (4) x context (1) x "
        "tensor (1) = 8, but there are 6 processes: set data_parallel_shard_degree = 3, or start "
        "8 processes."
    )
    with pytest.raises(MeshError, match=r"there is 1 process: start 8 processes\.$"):
        resolve_degrees(config, 1)


@pytest.mark.parametrize(("world_size", "product"), [(2, 4), (6, 4), (9, 8)])
def test_the_remaining_degree_must_be_an_integer(world_size: int, product: int) -> None:
    with pytest.raises(MeshError) as error:
        resolve_degrees(ParallelismConfig(data_parallel_replicate_degree=4), world_size)
    assert f"data_parallel_shard (what is left) x context (1) x tensor (1) = {product}" in str(
        error.value
    )
    assert str(error.value).endswith(f"start {product} processes.")


def test_a_mesh_of_one_process_has_every_axis_at_degree_one() -> None:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        assert dist.get_backend() == "gloo"
        assert mesh.device_mesh.mesh_dim_names == AXES
        assert mesh.device_mesh.shape == (1, 1, 1, 1, 1)
        assert (mesh.rank, mesh.world_size, mesh.batch_rank) == (0, 1, 0)
        assert mesh.is_leader
    assert not dist.is_initialized()


def test_one_process_agrees_with_itself() -> None:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as mesh:
        values = torch.tensor([1.5, -2.0])
        assert mesh.all_reduce_(values) is values
        assert values.tolist() == [1.5, -2.0]
        assert mesh.any(True) and not mesh.any(False)
        assert mesh.broadcast_int(2**53 + 1) == 2**53 + 1
        mesh.barrier()


def test_ranks_agree_on_sums_flags_and_numbers() -> None:
    for sums, numbers, flags, leader in run_on_threads(3, _agreement):
        assert sums == [6, 30]
        # Float32 has no odd integers of this size.
        assert numbers == [3 * (2**30 + 1), 3]
        assert flags == (True, False)
        assert leader == 2**40


def _agreement() -> tuple[list[float], list[float], tuple[bool, bool], int]:
    mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=3))
    rank = mesh.rank
    sums = mesh.all_reduce_(torch.tensor([rank + 1.0, 10.0])).tolist()
    numbers = mesh.all_reduce_numbers([2**30 + 1, rank])
    flags = mesh.any(rank == 1), mesh.any(False)
    return sums, numbers, flags, mesh.broadcast_int(2**40 + rank)


def test_no_rank_passes_a_barrier_before_all_have_arrived() -> None:
    has_passed = Event()

    def meet() -> None:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2))
        if mesh.rank == 1:
            assert not has_passed.wait(0.1)
        mesh.barrier()
        has_passed.set()

    run_on_threads(2, meet)


def test_ranks_with_the_same_samples_have_the_same_batch_rank() -> None:
    degrees = ParallelDims(dp_replicate=3, dp_shard=2, tp=2)
    ranks = run_on_threads(12, lambda: Mesh(detect_device("cpu"), degrees).batch_rank)
    assert ranks == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(
    "degrees", [ParallelDims(dp_shard=2, tp=2), ParallelDims(pp=2, tp=2)], ids=["shards", "stages"]
)
def test_a_tensor_on_one_axis_becomes_one_on_all_ranks_of_its_stage(degrees: ParallelDims) -> None:
    def sizes() -> tuple[int, int, bool]:
        mesh = Mesh(detect_device("cpu"), degrees)
        along = DTensor.from_local(torch.ones(2), mesh.device_mesh["tp"], [Shard(0)])
        on_stage = mesh.to_dtensor(along)
        by_axis = dict(
            zip(on_stage.device_mesh.mesh_dim_names or (), on_stage.placements, strict=True)
        )
        assert by_axis["tp"] == Shard(0)
        return on_stage.device_mesh.size(), len(on_stage), mesh.to_dtensor(on_stage) is on_stage

    assert run_on_threads(4, sizes) == [(4 // degrees.pp, 4, True)] * 4


def test_a_tensor_on_the_axis_of_the_stages_is_rejected() -> None:
    def convert() -> str:
        mesh = Mesh(detect_device("cpu"), ParallelDims(pp=2))
        whole = DTensor.from_local(torch.ones(2), mesh.device_mesh, [Shard(0)] * 5)
        with pytest.raises(MeshError) as error:
            mesh.to_dtensor(whole)
        return str(error.value)

    for message in run_on_threads(2, convert):
        assert f"['pp'] are not axes of a pipeline stage: {AXES[1:]}" in message


def test_ranks_with_other_degrees_share_their_meshes() -> None:
    def check() -> None:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2))
        other = mesh.with_degrees(ParallelDims(tp=2))
        assert other.degrees == ParallelDims(tp=2) and other.groups is mesh.groups
        assert mesh.with_degrees(ParallelDims(tp=2)) is other
        assert mesh.with_degrees(mesh.degrees) is mesh

    run_on_threads(2, check)


def test_a_notebook_keeps_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for comm, is_set in ((None, False), (CommConfig(), True)):
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "")
        monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
        with start_mesh(None, comm, detect_device("cpu")):
            assert ("TORCH_FR_BUFFER_SIZE" in os.environ) is is_set


def test_ranks_that_share_a_gpu_are_named_on_all_ranks() -> None:
    def check(*uuids: str) -> str:
        try:
            check_own_gpus(uuids[dist.get_rank()])
        except MeshError as error:
            return str(error)
        return ""

    assert (
        run_on_threads(3, check, "a", "b", "c") == run_on_threads(3, check, "", "", "") == [""] * 3
    )
    for message in run_on_threads(3, check, "a", "b", "a"):
        assert message.startswith("Ranks 0, 2 have the same GPU")


def test_the_group_is_destroyed_if_the_block_fails() -> None:
    with (
        pytest.raises(RuntimeError, match="inside"),
        start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")),
    ):
        raise RuntimeError("inside")
    assert not dist.is_initialized()


def test_an_existing_group_is_used_and_not_destroyed() -> None:
    device = detect_device("cpu")
    with start_mesh(ParallelismConfig(), CommConfig(), device):
        with start_mesh(ParallelismConfig(), CommConfig(), device) as inner:
            assert inner.world_size == 1
        assert dist.is_initialized()


def test_degrees_are_rejected_before_anything_starts() -> None:
    config = ParallelismConfig(data_parallel_shard_degree=2)
    with (
        pytest.raises(MeshError, match="there is 1 process"),
        start_mesh(config, CommConfig(), detect_device("cpu")),
    ):
        raise AssertionError("started")
    assert not dist.is_initialized()


def test_the_timeout_of_every_group_changes() -> None:
    with start_mesh(
        ParallelismConfig(), CommConfig(init_timeout_seconds=77), detect_device("cpu")
    ) as mesh:
        groups = [dist.group.WORLD, *mesh.device_mesh.get_all_groups()]
        assert _timeouts(groups) == {timedelta(seconds=77)}
        mesh.set_timeout(33)
        assert _timeouts(groups) == {timedelta(seconds=33)}


def _timeouts(groups: list[Any]) -> set[timedelta]:
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_the_expert_mesh_has_the_same_ranks() -> None:
    config = ParallelismConfig(
        data_parallel_replicate_degree=2,
        context_parallel_degree=3,
        tensor_parallel_degree=4,
        expert_parallel_degree=6,
        expert_tensor_parallel_degree=2,
    )
    degrees = resolve_degrees(config, 48)
    assert degrees.shape == (1, 2, 2, 3, 4)
    assert degrees.expert_shape == (1, 2, 2, 6, 2)


def test_each_size_is_the_product_of_its_own_axes() -> None:
    degrees = ParallelDims(pp=2, dp_replicate=4, dp_shard=10, cp=7, tp=3, ep=14, etp=3)
    assert degrees.shape == (2, 4, 10, 7, 3)
    assert degrees.expert_shape == (2, 4, 5, 14, 3)
    assert degrees.batch == 40
    assert degrees.token_copies == 42


@pytest.mark.parametrize(
    ("etp", "remedy"),
    [
        (1, "With expert_tensor_parallel_degree = 1, expert_parallel_degree may be 1, 2, 3, 6."),
        (2, "With expert_tensor_parallel_degree = 2, expert_parallel_degree may be 1, 3."),
        (4, "Set expert_tensor_parallel_degree to a divisor of 6."),
    ],
)
def test_experts_on_an_indivisible_number_of_ranks_are_rejected(etp: int, remedy: str) -> None:
    config = ParallelismConfig(
        data_parallel_replicate_degree=2,
        tensor_parallel_degree=2,
        expert_parallel_degree=4,
        expert_tensor_parallel_degree=etp,
    )
    with pytest.raises(MeshError) as error:
        resolve_degrees(config, 12)
    assert str(error.value) == (
        f"expert_parallel_degree (4) x expert_tensor_parallel_degree ({etp}) = {4 * etp} does not "
        "divide the ranks that share the weights: data_parallel_shard (3) x context (1) x tensor "
        f"(2) = 6. {remedy}"
    )


def test_ranks_that_start_check_that_each_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def refuse(uuid: str) -> NoReturn:
        checked.append(uuid)
        raise MeshError("two ranks use one GPU")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(mesh, "let_gloo_listen_toward_master", lambda: None)
    monkeypatch.setattr(mesh.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(mesh, "check_own_gpus", refuse)
    device = detect_device("cpu")
    with (
        pytest.raises(MeshError, match="two ranks use one GPU"),
        start_mesh(ParallelismConfig(), None, device),
    ):
        pass
    assert checked == [device.uuid]
