"""Styles of tensor parallelism on a mesh of one rank: what enters and leaves a module."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.harness.threads import run_on_threads
from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.attention import AcrossHeads
from torchtitan_lite.nn.decoder import OutputProjection
from torchtitan_lite.nn.dropout import KeyedDropout
from torchtitan_lite.nn.lora import AdaptedLinear
from torchtitan_lite.nn.loss import cross_entropy
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


_STYLES: dict[str, Callable[[], nn.Module]] = {
    # The row of padding is the first of the second rank.
    "embedding": lambda: nn.Embedding(7, 4, padding_idx=4),
    "rows": lambda: nn.Linear(6, 4),
    "adapted rows": lambda: AdaptedLinear(nn.Linear(6, 4, bias=False), rank=3, scale=0.5),
    "adapted columns": lambda: AdaptedLinear(nn.Linear(6, 4), rank=3, scale=0.5),
    "output": lambda: OutputProjection(4, 7),
}


@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("stream", [Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("kind", _STYLES)
def test_a_sharded_layer_has_the_output_and_the_gradients_of_the_entire_one(
    kind: str, stream: Placement, loss_parallel: bool
) -> None:
    draws = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws)

    whole = _STYLES[kind]()
    for parameter in whole.parameters():
        parameter.data = drawn(*parameter.shape)
    style = kind.removeprefix("adapted ")
    tokens_BS, weights_BSD = torch.tensor([[0, 4, 3, 6], [5, 4, 2, 1]]), drawn(2, 4, 4)
    x = tokens_BS if style == "embedding" else drawn(2, 4, 4 if style == "output" else 6)
    x_whole = x.clone().requires_grad_(x.is_floating_point())
    loss = cross_entropy()
    if style == "output":
        out = loss(x_whole.flatten(0, 1), whole.get_parameter("weight"), tokens_BS.flatten())
        out.backward()
    else:
        out = whole(x_whole)
        (out * weights_BSD).sum().backward()

    def run() -> None:
        rank = dist.get_rank()
        tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = deepcopy(whole)
        layer.zero_grad()
        adapter = tensor._detach_adapters(layer).get("")
        applied = tensor._parallel_style(style, stream, module=layer, loss_parallel=loss_parallel)
        layer = parallelize_module(layer, tp, applied)
        if adapter is not None:
            tensor._shard_adapter(layer, adapter, style, tp)

        def part(value: torch.Tensor, placement: Placement) -> torch.Tensor:
            return value.chunk(2, placement.dim)[rank] if isinstance(placement, Shard) else value

        held = {"rows": Shard(-1), "output": stream}.get(style, Replicate())
        own = part(x, held).clone().requires_grad_(x.is_floating_point())
        if style == "output":
            total = layer(own, tokens_BS, loss)
            total.backward()
            torch.testing.assert_close(total, out)
        else:
            entered = DTensor.from_local(own, tp, [held]) if adapter is not None else own
            found = layer(entered)
            placement = Shard(-1) if style == "columns" else stream
            if isinstance(found, DTensor):
                found = found.redistribute(placements=[placement]).to_local()
            torch.testing.assert_close(found, part(out, placement))
            (found * part(weights_BSD, placement)).sum().backward()
        if own.grad is not None and x_whole.grad is not None and style != "columns":
            torch.testing.assert_close(own.grad, part(x_whole.grad, held))
        for name, parameter in layer.named_parameters():
            exact = whole.get_parameter(name).grad
            grad = parameter.grad
            assert isinstance(grad, DTensor) and exact is not None
            torch.testing.assert_close(grad.full_tensor(), exact)

    run_on_threads(2, run)
