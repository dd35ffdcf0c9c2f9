"""FSDP over parameters that are DTensors of the full mesh, by torch's `DataParallelMeshDims`.

Norms, clipping, the optimizer and the boxes of checkpoints support such parameters as they support
those of our own tensor parallelism.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate

from tests.harness import tolerances
from tests.harness.jobs import Outcome, run_job
from tests.harness.ranks import WorkerPool
from tests.parity.meshes import BATCH_OF_1, HSDP, MESHES, TP, assert_same
from torchtitan_lite import parallel
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.spec import ModelSpec, modules_matching

Pools = Callable[[int], WorkerPool]


def shard_over_full_mesh(model: nn.Module, spec: ModelSpec, mesh: Mesh, *_: Any) -> None:
    """Replacement of `parallel.fsdp.apply`, after tensor parallelism."""
    replicas = ("dp_replicate",) if mesh.degrees.dp_replicate > 1 else ()
    full = _axes(mesh.device_mesh, (*replicas, "dp_shard", "tp"))
    for module in list(model.modules()):
        own = list(module.named_parameters(recurse=False))
        for name, parameter in own:
            assert isinstance(parameter, DTensor)
            placements = [Replicate()] * (full.ndim - 1) + list(parameter.placements)
            whole = DTensor.from_local(
                parameter.to_local(),
                full,
                placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            module.register_parameter(name, nn.Parameter(whole.detach()))
        if own:
            module.forward = _on_tp_axis(module, mesh.device_mesh["tp"], [name for name, _ in own])
    dims = DataParallelMeshDims(shard="dp_shard", replicate=replicas or None)
    for unit in modules_matching(model, spec.blocks, *spec.extra_fsdp_units):
        fully_shard(unit, mesh=full, dp_mesh_dims=dims)
    fully_shard(model, mesh=full, dp_mesh_dims=dims)
    parallel.fsdp._sum_gradients(model)


@cache
def _axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The submesh: one object for all runs of a worker.

    torch compares meshes by identity, and DTensor may give parameters an equal mesh of an earlier
    run.
    """
    return mesh[axes]


def _on_tp_axis(module: nn.Module, tp: DeviceMesh, names: list[str]) -> Callable[..., Any]:
    """The forward of a module with its parameters as DTensors of the tp axis alone.

    Gradients are partial over the other axes; FSDP reduces them.
    """
    forward, parameters = module.forward, module._parameters

    def lowered(*args: Any, **kwargs: Any) -> Any:
        given = {name: parameters[name] for name in names}
        for name, whole in given.items():
            assert isinstance(whole, DTensor)
            *others, own = whole.placements
            local = whole.to_local(grad_placements=[Partial()] * len(others) + [own])
            parameters[name] = DTensor.from_local(  # pyright: ignore[reportArgumentType]
                local, tp, [own], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        try:
            return forward(*args, **kwargs)
        finally:
            parameters.update(given)

    return lowered


def run_on_full_mesh(folder: Path, overrides: dict[str, Any]) -> Outcome:
    """Run a job with `shard_over_full_mesh` as FSDP."""
    ours = parallel.fsdp.apply
    parallel.fsdp.apply = shard_over_full_mesh
    try:
        return run_job(folder, overrides)
    finally:
        parallel.fsdp.apply = ours


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(*MESHES["fsdp-2-tp-2"], id="fsdp-2-tp-2"),
        pytest.param(8, {**HSDP, **TP, **BATCH_OF_1}, id="hsdp-2x2-tp-2"),
    ],
)
def test_parameters_on_the_full_mesh_train_equally(
    world_size: int, overrides: dict[str, Any], optimizer: str, pools: Pools, tmp_path: Path
) -> None:
    shared = {"optimizer.name": optimizer}
    alone = {**shared, "training.local_batch_size": 8}
    (expected,) = pools(1).run(run_job, tmp_path / "1", alone)
    settings = {**overrides, **shared}
    for outcome in pools(world_size).run(run_on_full_mesh, tmp_path / "run", settings):
        assert_same(outcome, expected, tolerances.PARITY_FLOAT64)
