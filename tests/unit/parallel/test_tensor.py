"""Styles of tensor parallelism on a mesh of one rank: what enters and leaves a module."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness.threads import run_on_threads
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.attention import AcrossHeads
from torchtitan_lite.nn.dropout import KeyedDropout
from torchtitan_lite.parallel import context, tensor
from torchtitan_lite.parallel.autograd_collectives import _AllGather
from torchtitan_lite.parallel.pipeline import SharedWeight
from torchtitan_lite.parallel.pipeline_stages import StagePlan


@pytest.fixture
def tp(mesh: Mesh) -> Iterator[DeviceMesh]:
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


def test_replicated_computation_takes_and_returns_plain_tensors(tp: DeviceMesh) -> None:
    layer = nn.Linear(2, 2)
    tensor._Whole()._apply(layer, tp)
    assert isinstance(layer.weight, DTensor)
    output = layer(torch.ones(1, 2))
    assert not isinstance(output, DTensor) and output.shape == (1, 2)


def test_the_input_is_gathered_along_the_sequence(tp: DeviceMesh) -> None:
    class Module(nn.Module):
        def forward(self, x: Any, other: int) -> Any:
            return x, other

    x, other = tensor._Gathered(Shard(1))._apply(Module(), tp)(torch.ones(1, 2), 7)
    assert isinstance(x, DTensor) and x.placements == (Replicate(),) and other == 7


def test_the_weights_of_the_own_heads_are_plain_tensors(tp: DeviceMesh) -> None:
    class Sinks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self) -> torch.Tensor:
            return self.weight * 1

    sinks = tensor._HeadWeights()._apply(Sinks(), tp)
    assert isinstance(sinks.weight, DTensor) and not isinstance(sinks(), DTensor)


def test_dropout_and_what_all_heads_read_know_the_shard(
    monkeypatch: pytest.MonkeyPatch, tp: DeviceMesh
) -> None:
    for name, value in {
        "_styles": {},
        "_parents_of": [],
        "_shared_parameters": [],
        "_detach_adapters": {},
        "_replicate_rest": None,
        "parallelize_module": None,
    }.items():
        monkeypatch.setattr(tensor, name, lambda *given, v=value: v)
    monkeypatch.setattr(tensor, "_own_positions", lambda tp, module, inputs: (*inputs[:2], "own"))
    monkeypatch.setattr(tensor, "_gathered_for_heads", lambda tp, stream, module, inputs, x: "all")

    class Dropout(KeyedDropout):
        def forward(self, x_BSD: Any, rng_keys_B: Any, positions_BS: Any) -> Any:
            return x_BSD, rng_keys_B, positions_BS

    model: Any = nn.ModuleList([Dropout(0.5, 0), AcrossHeads()])
    mesh: Any = SimpleNamespace(degrees=SimpleNamespace(tp=2), device_mesh={"tp": tp})
    unused: Any = None
    tensor.apply(model, unused, mesh, ParallelismConfig())
    assert model[0](1, 2, 3) == (1, 2, "own") and model[1](torch.ones(1)) == "all"


def test_the_gradient_of_a_gather_returns_to_its_rank(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, float("nan")))
    x = torch.ones(2, 3, requires_grad=True)
    gathered = _AllGather.apply(x, torch.distributed.group.WORLD)
    (3 * gathered).sum().backward()  # pyright: ignore
    assert x.grad is not None and x.grad.tolist() == [[3.0] * 3] * 2


def test_what_a_ring_passes_on_is_used_after_it_has_arrived() -> None:
    arriving = torch.zeros(2)
    requests: list[Any] = [SimpleNamespace(wait=lambda: arriving.add_(1)) for _ in range(2)]
    assert context._arrived(arriving, requests).tolist() == [2.0, 2.0]


def test_a_gradient_is_returned_to_the_owner_once() -> None:
    owner, copy = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    owner.grad, copy.grad = torch.ones(2), torch.full((2,), 2.0)
    weight: Any = object.__new__(SharedWeight)
    weight._owner, weight._copy = owner, copy
    weight._owner_rank, weight._copy_rank = 0, 1
    weight._move = lambda given, wanted, ranks, apply: (
        None if given is None else apply(wanted, given)
    )
    weight.return_gradient()
    assert owner.grad.tolist() == [3.0, 3.0] and copy.grad is None


def test_a_copy_on_another_rank_follows_its_owner_and_returns_its_gradient() -> None:
    """An uneven shard may be empty."""

    def run(num_rows: int) -> list[float]:
        group, rank = dist.group.WORLD, dist.get_rank()
        assert group is not None
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.full((num_rows, 2), 1.0 + rank))
        layer.weight.grad = torch.full_like(layer.weight, 10.0 + rank)
        stage = nn.ModuleDict({"embed": layer} if rank == 0 else {"out": layer})
        plan = StagePlan(modules=(("embed",), (), ("out",)), ranks=(0, 2, 1))
        held = {0: stage} if rank == 0 else {2: stage} if rank == 1 else {}
        shared = SharedWeight(held, plan, ("embed", "out"), (0, 2), group)
        shared.refresh()
        shared.return_gradient()
        grad = layer.weight.grad
        return [layer.weight.sum().item(), -1.0 if grad is None else grad.sum().item()]

    assert run_on_threads(3, run, 1) == [[2.0, 42.0], [2.0, -1.0], [6.0, 24.0]]
    assert run_on_threads(3, run, 0) == [[0.0, 0.0], [0.0, -1.0], [0.0, 0.0]]
