"""Implicit redistributions of DTensors are rejected, with the operation and the module named."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.harness.ranks import WorkerPool
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import ConfigError, RedistributionError
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.debug import explicit_redistribution

Pools = Callable[[int], WorkerPool]


class Projection(nn.Module):
    """A linear whose rows are sharded over the ranks, with configurable placements of its input and
    of the gradient of its output."""

    def __init__(self, given: Placement, gradient: Placement, explicit: bool) -> None:
        super().__init__()
        self.tp = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        self.weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), self.tp, [Shard(0)]))
        self.given, self.gradient, self.explicit = given, gradient, explicit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        placed = DTensor.from_local(x, self.tp, [self.given], run_check=False)
        if self.explicit:
            placed = placed.redistribute(placements=[Replicate()])
        out = nn.functional.linear(placed, self.weight)
        assert isinstance(out, DTensor)
        return out.to_local(grad_placements=[self.gradient])


class Toy(nn.Module):
    def __init__(self, given: Placement, gradient: Placement, explicit: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Projection(given, gradient, explicit)])
        self.scale = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.scale(x))


def _message(given: Placement, gradient: Placement, explicit: bool) -> str:
    """Return the error when the toy model is trained; empty if there is none."""
    torch.manual_seed(0)
    model = Toy(given, gradient, explicit)
    try:
        with explicit_redistribution([model])():
            model(torch.ones(4, 4)).sum().backward()
    except RedistributionError as error:
        return str(error)
    assert all(parameter.grad is not None for parameter in model.parameters())
    return ""


@pytest.mark.matrix
def test_explicit_redistributions_are_allowed(pools: Pools) -> None:
    assert pools(2).run(_message, Shard(0), Shard(1), True) == ["", ""]


@pytest.mark.matrix
def test_an_operation_in_forward_is_named(pools: Pools) -> None:
    for message in pools(2).run(_message, Shard(0), Shard(1), False):
        assert "in the forward of layers.0: aten." in message
        assert re.search(r"placed as \(S\(\d\)\) and needs it as \(R\)", message), message
        assert "Call redistribute()" in message


def test_an_operation_in_backward_is_named(pools: Pools) -> None:
    for message in pools(2).run(_message, Shard(0), Replicate(), True):
        assert "in the backward of layers.0: aten.mm.default is given" in message


def test_the_sum_of_from_local_in_backward_is_named(pools: Pools) -> None:
    for message in pools(2).run(_message, Replicate(), Shard(1), False):
        assert "in the backward of layers.0: the gradient of DTensor.from_local" in message
        assert "placed as (P(sum)) and needs it as (R)" in message


def test_outside_of_the_context_everything_is_allowed(pools: Pools) -> None:
    pools(2).run(_train_twice)


def _train_twice() -> None:
    model = Toy(Replicate(), Shard(1), False)
    with pytest.raises(RedistributionError), explicit_redistribution([model])():
        model(torch.ones(4, 4)).sum().backward()
    model(torch.ones(4, 4)).sum().backward()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_compiled_blocks_are_not_checked() -> None:
    config = Config.model_validate(
        {"debug": {"explicit_redistribution": True}, "compile": {"enable": True}}
    )
    with pytest.raises(ConfigError, match=r"debug.explicit_redistribution = true cannot see"):
        check_against(config, 1)
