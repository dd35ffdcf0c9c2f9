"""Muon in one process: updates of torch.optim.Muon, and the iteration against singular values."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.tolerances import NEWTON_SCHULZ_FLOAT64
from tests.unit.conftest import RecordedStreams
from tests.unit.models.tiny import (
    QWEN3_EXPERTS,
    tiny_decoder,
    tiny_samples,
    tiny_spec,
    tiny_targets,
)
from torchtitan_lite.config.tables.optimizer import OptimizerConfig
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.models import qwen3
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.spec import ShardRule
from torchtitan_lite.optim import ShardedOptimizer, build_optimizer
from torchtitan_lite.optim.muon import Muon
from torchtitan_lite.optim.newton_schulz import COEFFICIENTS, NewtonSchulz
from torchtitan_lite.optim.optimizer import uses_muon

SPEC = tiny_spec()


def build(model: nn.Module, **options: Any) -> ShardedOptimizer:
    config = OptimizerConfig.model_validate({"name": "Muon", "lr": 0.02, **options})
    return build_optimizer(
        config, model, SPEC.no_decay, detect_device("cpu"), no_muon=SPEC.muon_exclusions
    )


def train(model: nn.Module, step: Any, steps: int = 3) -> None:
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy())
        (loss / 46).backward()
        step()


def tiny_experts() -> nn.Module:
    spec = qwen3.spec_of(QWEN3_EXPERTS, "tiny")
    model = spec.build()
    initialize(model, spec.init, seed=5)
    return model.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("nesterov", "adjust_lr"), [(True, "original"), (False, "match_rms_adamw")]
)
def test_weights_are_those_of_torch_bit_by_bit(
    dtype: torch.dtype, nesterov: bool, adjust_lr: str
) -> None:
    model, other = tiny_decoder(dtype), tiny_decoder(dtype)
    optimizer = build(
        model,
        adamw_lr=1e-3,
        beta1=0.8,
        beta2=0.9,
        eps=1e-6,
        weight_decay=0.3,
        muon_momentum=0.9,
        muon_nesterov=nesterov,
        muon_ns_steps=4,
        muon_adjust_lr=adjust_lr,
    )
    train(model, lambda: optimizer.step(0.02))
    named = dict(other.named_parameters())
    inside = {name for name, p in named.items() if p.ndim == 2 and name.startswith("layers.")}
    muon = torch.optim.Muon(
        [named[name] for name in inside],
        lr=0.02,
        weight_decay=0.3,
        momentum=0.9,
        nesterov=nesterov,
        ns_steps=4,
        adjust_lr_fn=adjust_lr,
    )
    decayed = [named["output.weight"]]
    exempt = [p for n, p in named.items() if n not in inside and n != "output.weight"]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": exempt, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.8, 0.9),
        eps=1e-6,
        fused=True,
    )
    train(other, lambda: (muon.step(), adamw.step()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_stacked_experts_are_orthogonalized_matrix_by_matrix() -> None:
    model = tiny_experts()
    stacks = {n: p for n, p in model.named_parameters() if p.ndim == 3}
    # The same gradients, each expert's matrix as a parameter of its own.
    single = {
        (name, index): nn.Parameter(matrix.clone())
        for name, stack in stacks.items()
        for index, matrix in enumerate(stack.detach())
    }
    optimizer = build(model)
    expected = torch.optim.Muon(list(single.values()), lr=0.02, weight_decay=0.1)

    def step() -> None:
        for (name, index), matrix in single.items():
            gradient = stacks[name].grad
            assert gradient is not None
            matrix.grad = gradient[index].clone()
        optimizer.step(0.02)
        expected.step()

    train(model, step)
    assert len(single) == 3 * 3 * 7
    for (name, index), matrix in single.items():
        assert torch.equal(stacks[name][index], matrix), (name, index)


def test_embeddings_output_norms_biases_and_routers_are_left_to_adamw() -> None:
    model = tiny_experts()
    attention, experts = "layers.0.attention.wq", "layers.0.feed_forward.experts"
    model.get_submodule(attention).bias = nn.Parameter(torch.zeros(60))
    model.get_submodule(experts).w1_bias = nn.Parameter(torch.zeros(7, 11))
    optimizer = build(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.02)
    of_muon = {
        name for name, p in model.named_parameters() if "momentum_buffer" in optimizer.slots(p)
    }
    of_adamw = {name for name, p in model.named_parameters() if "exp_avg" in optimizer.slots(p)}
    assert not of_muon & of_adamw
    assert of_muon | of_adamw == {name for name, _ in model.named_parameters()}
    assert of_muon == {
        f"layers.{layer}.{matrix}"
        for layer in range(3)
        for matrix in (
            *(f"attention.w{letter}.weight" for letter in "qkvo"),
            *(f"feed_forward.experts.w{number}" for number in (1, 2, 3)),
        )
    }


def test_a_family_of_other_names_is_known_by_its_shard_plan() -> None:
    rules = (
        ShardRule(pattern="lookup.weight", style="embedding"),
        ShardRule(pattern="block.weight", style="columns"),
        ShardRule(pattern="head.weight", style="output"),
    )
    excluded = replace(SPEC, shard_plan=rules).muon_exclusions
    matrix = torch.zeros(2, 3)
    names = ["lookup.weight", "block.weight", "head.weight", "block.router.gate.weight"]
    assert [name for name in names if uses_muon(name, matrix, excluded)] == ["block.weight"]
    for other in (matrix[0], matrix[None, None]):
        assert not uses_muon("block.weight", other, excluded)


@pytest.mark.parametrize("shape", [(7, 7), (12, 5), (5, 31), (1, 4)])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_iteration_applies_its_polynomial_to_the_singular_values(
    shape: tuple[int, int], steps: int
) -> None:
    a, b, c = COEFFICIENTS
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    NewtonSchulz(steps=steps, dtype=torch.float64).orthogonalize_(matrix)
    torch.testing.assert_close(
        matrix, u @ s.diag() @ vh, atol=NEWTON_SCHULZ_FLOAT64, rtol=NEWTON_SCHULZ_FLOAT64
    )


def test_a_matrix_of_zeros_stays_zero() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        matrix = torch.zeros(3, 4, dtype=dtype)
        NewtonSchulz(steps=5, dtype=dtype).orthogonalize_(matrix)
        assert torch.equal(matrix, torch.zeros(3, 4, dtype=dtype))


def test_operations_are_those_of_the_products() -> None:
    counted = NewtonSchulz(steps=3, dtype=torch.float64)
    for rows, columns in itertools.product([2, 5, 9], repeat=2):
        with FlopCounterMode(display=False) as counter:
            counted.orthogonalize_(torch.randn(rows, columns, dtype=torch.float64))
        assert counted.flops((rows, columns)) == counter.get_total_flops()


def test_updates_have_the_size_of_those_of_adamw() -> None:
    """With match_rms_adamw the root mean square of an update is about 0.2."""
    model = nn.ModuleDict({"wide": nn.Linear(200, 50), "tall": nn.Linear(50, 200)})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(model, muon_adjust_lr="match_rms_adamw", weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    optimizer.step(1.0)
    for name in ("wide.weight", "tall.weight"):
        update = dict(model.named_parameters())[name].detach() - before[name]
        assert 0.15 < update.square().mean().sqrt() < 0.25


def test_a_parameter_without_a_gradient_is_unchanged() -> None:
    model = nn.ModuleDict({"one": nn.Linear(3, 4), "other": nn.Linear(3, 4)})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build(model, weight_decay=0.5)
    for parameter in model["one"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("other"), name
        assert bool(optimizer.slots(parameter)) == name.startswith("one")


def test_a_model_without_matrices_is_left_to_adamw() -> None:
    model = nn.LayerNorm(4)
    optimizer = build(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1)
    assert all("exp_avg" in optimizer.slots(parameter) for parameter in model.parameters())


def test_a_step_does_not_depend_on_a_value_of_the_device() -> None:
    assert not build(tiny_decoder(torch.float32)).can_step_unless(torch.device("cpu"))


class _Kept:
    """Keeps the updates as they are."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def run(self, shards: Sequence[torch.Tensor]) -> None:
        self.seen = [shard.clone() for shard in shards]


def muon_of(parameters: list[nn.Parameter], orthogonalization: _Kept, device: str) -> Muon:
    return Muon(
        [{"params": parameters, "weight_decay": 0.0}],
        [parameter.shape for parameter in parameters],
        orthogonalization,
        lr=1.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr="original",
        dtype=torch.float32,
        device=torch.device(device),
    )


def test_a_matrix_without_a_gradient_takes_part_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices of one step are exchanged together."""
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: torch.full(shape, math.nan, **kind))
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    parameters[0].grad = torch.ones(2, 2)
    kept = _Kept()
    muon_of(parameters, kept, "cpu").step()
    assert [update.sum().item() for update in kept.seen] == [4.0, 0.0]


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_the_host_waits_for_the_updates_of_offloaded_parameters(
    streams: RecordedStreams, is_offloaded: bool
) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    # With a number it is another device than that of the parameter, with the same memory.
    muon_of([parameter], _Kept(), "cpu:0" if is_offloaded else "cpu").step()
    assert streams.log == (["host waits for main"] if is_offloaded else [])


def test_no_gradient_is_left() -> None:
    model = tiny_decoder(torch.float32)
    optimizer = build(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
