"""Low-rank adapters of one process: initialization, targets, the update, and the merged weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tests.harness.jobs import ODD_DEEPSEEK, ODD_DIMS, ODD_EXPERTS
from tests.harness.tolerances import LOGITS_FLOAT32, MERGED_FLOAT64
from torchtitan_lite.config.tables.lora import LoRAConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.redistribute import Box
from torchtitan_lite.models import deepseek_v3, llama3, qwen3
from torchtitan_lite.nn.initialize import allocate_memory, draw_box, initialize, on_meta
from torchtitan_lite.nn.lora import AdaptedLinear, merge_adapters, merged, with_adapters
from torchtitan_lite.nn.spec import ModelSpec

SPEC = llama3.spec_of(ODD_DIMS, "odd")
EXPERTS = qwen3.spec_of(ODD_EXPERTS, "odd_experts")


def model_of(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = on_meta(spec.build, dtype)
    allocate_memory(model, torch.device("cpu"))
    initialize(model, spec.init, 3)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    tokens_BS = torch.arange(38).view(2, 19) * 7 % ODD_DIMS.vocab_size
    positions_BS = torch.arange(19).expand(2, -1)
    keys_B = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        return model(tokens_BS, positions_BS=positions_BS, rng_keys_B=keys_B)


def trained(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """A model whose updates are not zero."""
    model = model_of(spec, dtype)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, AdaptedLinear):
                module.lora_b.normal_(0.0, 0.1, generator=random)
    return model


def test_adapters_that_are_not_trained_do_not_change_a_logit() -> None:
    spec = with_adapters(SPEC, LoRAConfig())
    assert torch.equal(logits(model_of(spec)), logits(model_of(SPEC)))


def test_only_adapters_are_trained_and_all_linear_layers_have_one() -> None:
    spec = with_adapters(SPEC, LoRAConfig(rank=3))
    model = spec.build()
    adapted = [m for m in model.modules() if isinstance(m, AdaptedLinear)]
    assert len(adapted) == 7 * ODD_DIMS.num_layers
    added = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert added == sum(3 * (m.in_features + m.out_features) for m in adapted)
    trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained_names} == {"lora_a", "lora_b"}
    assert spec.cost(24).num_params == SPEC.cost(24).num_params + added
    matrices = (
        sum(m.in_features * m.out_features for m in adapted) + ODD_DIMS.vocab_size * ODD_DIMS.dim
    )
    saved = SPEC.cost(24).flops_per_token - spec.cost(24).flops_per_token
    assert saved == 2 * matrices - 6 * added


def test_initial_adapters_are_those_of_peft() -> None:
    """Kaiming uniform with a = sqrt(5) is uniform within 1 / sqrt(inputs); B is zero."""
    model = model_of(with_adapters(SPEC, LoRAConfig(rank=40)))
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            bound = module.in_features**-0.5
            assert 0.9 * bound < module.lora_a.abs().max() <= bound
            assert module.lora_a.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
            assert not module.lora_b.any()


def test_any_box_of_a_uniform_draw_is_that_part_of_the_whole() -> None:
    (rule, *_) = with_adapters(SPEC, LoRAConfig()).init
    name, shape = "layers.0.attention.wq.lora_a", (9, 36)
    whole = draw_box(name, shape, Box((0, 0), shape), rule, 0)
    part = draw_box(name, shape, Box((2, 5), (4, 20)), rule, 0)
    assert torch.equal(part, whole[2:6, 5:25])
    assert not torch.equal(whole, draw_box("layers.1", shape, Box((0, 0), shape), rule, 0))


@pytest.mark.parametrize(
    ("spec", "targets", "chosen"),
    [
        (SPEC, ["layers.1.attention.w[qv]"], {"layers.1.attention.wq", "layers.1.attention.wv"}),
        (SPEC, ["wo", "layers.0.feed_forward.*"], None),
        (EXPERTS, ["*"], None),
    ],
)
def test_patterns_match_the_ends_of_names(
    spec: ModelSpec, targets: list[str], chosen: set[str] | None
) -> None:
    model = with_adapters(spec, LoRAConfig(targets=targets)).build()
    found = {name for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    if chosen is None and spec is EXPERTS:
        # Neither experts nor their routers.
        chosen = {f"layers.{n}.attention.w{x}" for n in range(3) for x in "qkvo"}
    elif chosen is None:
        chosen = {f"layers.{n}.attention.wo" for n in range(3)}
        chosen |= {f"layers.0.feed_forward.w{n}" for n in (1, 2, 3)}
    assert found == chosen


@pytest.mark.parametrize(
    ("targets", "given"),
    [
        (["wq", "q_proj", "feed_forward.experts.w1"], '"q_proj", "feed_forward.experts.w1"'),
        (["output"], '"output"'),
        ([], "[]"),
    ],
)
def test_patterns_that_match_nothing_are_one_error(targets: list[str], given: str) -> None:
    with pytest.raises(ConfigError) as raised:
        with_adapters(SPEC, LoRAConfig(targets=targets))
    assert str(raised.value) == (
        f"lora.targets: {given} matches no linear layer. Use the ends of names in this project, of "
        "attention.wq, attention.wk, attention.wv, attention.wo, feed_forward.w1, feed_forward.w2, "
        "feed_forward.w3; stacked experts, routers, embedding and output have no adapters."
    )


@pytest.mark.parametrize("given", [{"rank": 0}, {"alpha": 0.0}])
def test_a_rank_or_a_factor_of_zero_is_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="must be"):
        LoRAConfig(**given)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, MERGED_FLOAT64), (torch.float32, LOGITS_FLOAT32)]
)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_weights_give_the_same_logits(
    dtype: torch.dtype, tolerance: float, use_rslora: bool
) -> None:
    config = LoRAConfig(rank=4, alpha=8.0, use_rslora=use_rslora)
    assert config.scale == (4.0 if use_rslora else 2.0)
    model = trained(with_adapters(SPEC, config), dtype)
    before = logits(model)
    assert (before - logits(model_of(SPEC, dtype))).abs().max() > 1e-2
    merge_adapters(model)
    assert all(not m.lora_b.any() for m in model.modules() if isinstance(m, AdaptedLinear))
    torch.testing.assert_close(logits(model), before, atol=tolerance, rtol=0)


def test_latent_attention_and_shared_experts_have_adapters() -> None:
    spec = deepseek_v3.spec_of(replace(ODD_DEEPSEEK, mtp_depth=0), "odd")
    model = with_adapters(spec, LoRAConfig(rank=2)).build()
    names = {name for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    assert "layers.1.feed_forward.shared.w1" in names and "layers.0.attention.wkv_b" in names
    assert not any("router" in name or "experts" in name for name in names)


def test_a_merged_bfloat16_weight_is_rounded_once() -> None:
    weight_OI, a_RI, b_OR = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for seed, shape in enumerate([(7, 5), (3, 5), (7, 3)])
    )
    exact_OI = weight_OI.double() + b_OR.double() @ a_RI.double() * 0.3
    assert torch.equal(merged(weight_OI, a_RI, b_OR, 0.3), exact_OI.bfloat16())
