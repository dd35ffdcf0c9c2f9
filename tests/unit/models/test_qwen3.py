"""Qwen3, dense and MoE: compared with Hugging Face's, sizes, cost and rules."""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.harness.tolerances import COUNTED_FLOPS, LOGITS_FLOAT32, LOGITS_FLOAT64
from tests.unit.models.tiny import QWEN3 as DENSE
from tests.unit.models.tiny import QWEN3_EXPERTS as SPARSE
from tests.unit.models.tiny import tiny_samples, tiny_targets
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import model_spec, qwen3
from torchtitan_lite.models.qwen3 import Qwen3Dims
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.decoder_family import build_decoder
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.moe import MoE, MoEDims

BOTH = pytest.mark.parametrize("dims", [DENSE, SPARSE], ids=["dense", "experts"])


@pytest.mark.parametrize("tied", [False, True])
@BOTH
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, LOGITS_FLOAT32), (torch.float64, LOGITS_FLOAT64)]
)
def test_logits_equal_those_of_transformers(
    dims: Qwen3Dims, dtype: torch.dtype, tolerance: float, tied: bool
) -> None:
    model = _drawn(replace(dims, tied_embeddings=tied), dtype).eval()
    theirs = _theirs(dims, tied).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype)
    missing, unexpected = theirs.load_state_dict(_named_as_theirs(model), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    samples = tiny_samples(length=41)
    with torch.no_grad():
        ours_BSV = model(**samples)
        theirs_BSV = theirs(samples["tokens_BS"]).logits
    assert ours_BSV.std() > 0.1
    torch.testing.assert_close(ours_BSV, theirs_BSV, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("flavor", "billions", "active_billions"),
    [
        ("0.6B", 0.596, 0.596),
        ("1.7B", 1.721, 1.721),
        ("4B", 4.022, 4.022),
        ("8B", 8.191, 8.191),
        ("14B", 14.768, 14.768),
        ("32B", 32.762, 32.762),
        ("30B-A3B", 30.532, 3.353),
        ("235B-A22B", 235.094, 22.191),
    ],
)
def test_released_sizes_have_the_parameters_of_the_release(
    flavor: str, billions: float, active_billions: float
) -> None:
    cost = model_spec(ModelConfig(name="qwen3", flavor=flavor)).cost(8)
    assert round(cost.num_params / 1e9, 3) == billions
    assert round(cost.num_active_params / 1e9, 3) == active_billions


@pytest.mark.parametrize("flavor", sorted(qwen3.FLAVORS))
def test_the_spec_of_a_flavor_fits_its_module(flavor: str) -> None:
    spec = model_spec(ModelConfig(name="qwen3", flavor=flavor))
    with torch.device("meta"):
        model = spec.build()
    parameters = dict(model.named_parameters())
    assert all(parameter.is_meta for parameter in parameters.values())
    assert spec.cost(4096).num_params == sum(p.numel() for p in parameters.values())
    assert parameters["tok_embeddings.weight"].shape == (spec.vocab_size, spec.dims.dim)
    for name in parameters:
        assert any(fnmatchcase(name, rule.pattern) for rule in spec.init), name
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for rule in (*spec.init, *spec.shard_plan):
        assert any(fnmatchcase(name, rule.pattern) for name in names), rule.pattern
    modules = dict(model.named_modules())
    assert all(unit in modules for unit in (*spec.stage_units, *spec.extra_fsdp_units))
    # Tied weights are one parameter: only the model itself gathers it.
    is_tied = len(parameters) < len(names)
    assert spec.extra_fsdp_units == (() if is_tied else ("tok_embeddings", "output"))


def test_the_shard_plan_splits_head_norms_over_heads() -> None:
    plan = qwen3.spec_of(DENSE, "tiny").shard_plan
    cuts = {
        name: next((rule.style for rule in plan if fnmatchcase(name, rule.pattern)), None)
        for name, _ in build_decoder(DENSE).named_parameters()
    }
    assert cuts["layers.1.attention.q_norm.weight"] == "heads"
    assert cuts["layers.1.attention.k_norm.weight"] == "heads"
    assert cuts["layers.1.attention_norm.weight"] == "sequence"
    assert None not in cuts.values()


def test_tensor_parallelism_skips_experts_and_shards_shared_experts() -> None:
    moe = SPARSE.moe
    assert moe is not None
    shared = replace(SPARSE, moe=replace(moe, shared_hidden_dim=8))
    inside = "layers.*.feed_forward."
    for dims, expected in (
        (SPARSE, {"router.gate.weight"}),
        (shared, {"router.gate.weight", "shared.w[13].weight", "shared.w2.weight"}),
    ):
        patterns = [rule.pattern for rule in qwen3.spec_of(dims, "tiny").shard_plan]
        assert expected == {p.removeprefix(inside) for p in patterns if p.startswith(inside)}
        assert "layers.*.attention.wo.weight" in patterns


def test_experts_start_like_the_feed_forward() -> None:
    moe = MoEDims(num_experts=5, top_k=2, hidden_dim=48)
    dims = replace(SPARSE, dim=128, head_dim=16, moe=moe)
    model = build_decoder(dims)
    initialize(model, qwen3.spec_of(dims, "wide").init, seed=0)
    weights = dict(model.named_parameters())
    cut_at_3 = 0.9866  # Deviation of a normal distribution truncated at three deviations.
    for layer in range(3):
        block = f"layers.{layer}"
        shrunk = cut_at_3 * 0.02 / (2 * (layer + 1)) ** 0.5
        for name in ("attention.wo.weight", "feed_forward.experts.w2", "feed_forward.experts.w3"):
            assert weights[f"{block}.{name}"].std().item() == pytest.approx(shrunk, rel=0.03)
        for name in ("feed_forward.experts.w1", "attention.wq.weight"):
            assert weights[f"{block}.{name}"].std().item() == pytest.approx(
                cut_at_3 * 0.02, rel=0.05
            )
        assert (weights[f"{block}.attention.q_norm.weight"] == 1).all()
    experts_XFD = weights["layers.0.feed_forward.experts.w1"]
    assert not torch.equal(experts_XFD[0], experts_XFD[1])


@BOTH
@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_equal_torchs_count(dims: Qwen3Dims, tied: bool) -> None:
    batch_size, length = 2, 24
    dims = replace(dims, tied_embeddings=tied)
    model = _drawn(dims)
    with (
        FlopCounterMode(display=False, custom_mapping=_GROUPED_FLOPS) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        loss = model(
            **tiny_samples(batch_size, length),
            targets_BS=tiny_targets(batch_size, length),
            loss=cross_entropy(),
        )
        loss.backward()
    counted = counter.get_flop_counts()["Global"]
    num_tokens = batch_size * length
    pairs = 2 * num_tokens * length * dims.num_heads * dims.head_dim * dims.num_layers
    attention = (2 + 4) * pairs
    # The weighted sum of a token's experts is a product too, but not with a matrix of the model.
    weighting = 0
    if dims.moe is not None:
        weighting = 3 * 2 * num_tokens * dims.moe.top_k * dims.dim * dims.num_layers
    assert counted[torch.ops.aten.bmm] == attention + weighting
    # Attention is counted over all pairs of positions; a causal mask needs half of them.
    expected = sum(counted.values()) - attention / 2 - weighting
    cost = qwen3.spec_of(dims, "tiny").cost(length)
    assert cost.flops_per_token * num_tokens == pytest.approx(expected, rel=COUNTED_FLOPS)


def test_an_moe_model_learns() -> None:
    model = _drawn(SPARSE, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples, targets_BS = tiny_samples(), tiny_targets()
    losses = []
    for _ in range(15):
        loss = model(**samples, targets_BS=targets_BS, loss=cross_entropy())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for module in model.modules():
        if isinstance(module, MoE):
            assert module.router.load_X.sum() == 15 * samples["tokens_BS"].numel() * 3


def test_the_config_overrides_the_attention_of_a_flavor() -> None:
    config = ModelConfig(name="qwen3", flavor="tiny_moe")
    assert model_spec(config).document_mask
    plain = config.model_copy(update={"attention_mask": "causal", "attention_backend": "flex"})
    assert not model_spec(plain).document_mask
    assert model_spec(plain).dims.attention_backend == "flex"


def test_an_unknown_size_lists_known_names_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'"30B-A3" is not one of tiny, .*"30B-A3B"\?'):
        model_spec(ModelConfig(name="qwen3", flavor="30B-A3"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, r"num_kv_heads \(4\) must divide num_heads \(6\)"),
        ({"head_dim": 9}, r"width of a head \(9\) must be even"),
        ({"hidden_dim": None}, r"either hidden_dim \(None\).* or moe \(None\)"),
        ({"moe": SPARSE.moe}, r"either hidden_dim \(38\).* or moe \(MoEDims\(num_experts=7"),
    ],
)
def test_invalid_dimensions_are_rejected(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DENSE, **changes)


def _linear_flops(x_NI: Any, weight_XOI: Any, counts_X: Any, **_: Any) -> int:
    return 2 * x_NI[0] * weight_XOI[1] * weight_XOI[2]


def _outer_flops(grad_NO: Any, x_NI: Any, counts_X: Any, **_: Any) -> int:
    return 2 * x_NI[0] * x_NI[1] * grad_NO[1]


_GROUPED_FLOPS = {
    torch.ops.torchtitan_lite.grouped_linear: _linear_flops,
    torch.ops.torchtitan_lite.grouped_outer: _outer_flops,
}


def _drawn(dims: Qwen3Dims, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return a model with initialized weights, in training mode."""
    model = build_decoder(dims)
    initialize(model, qwen3.spec_of(dims, "tiny").init, seed=11)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype)
        if "q_norm" in name or "k_norm" in name:
            # Weights of one would hide a norm on the wrong side.
            parameter.data *= torch.linspace(0.5, 1.5, parameter.numel(), dtype=dtype)
    return model


def _theirs(dims: Qwen3Dims, tied: bool) -> nn.Module:
    shared: dict[str, Any] = {
        "hidden_size": dims.dim,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "vocab_size": dims.vocab_size,
        "rms_norm_eps": dims.norm_eps,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": dims.rope_theta},
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }
    if dims.moe is None:
        shared["intermediate_size"] = dims.hidden_dim
        return Qwen3ForCausalLM(Qwen3Config(**shared))
    # Their grouped product does not support float64.
    shared["experts_implementation"] = "eager"
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **shared,
            num_experts=dims.moe.num_experts,
            num_experts_per_tok=dims.moe.top_k,
            moe_intermediate_size=dims.moe.hidden_dim,
            norm_topk_prob=dims.moe.normalize_weights,
        )
    )


_THEIR_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.": "model.layers.",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.router.gate": "mlp.gate",
    "feed_forward.experts.w1": "mlp.experts.gate_up_proj",
    "feed_forward.experts.w2": "mlp.experts.down_proj",
    "output.": "lm_head.",
}


def _named_as_theirs(model: Decoder) -> dict[str, torch.Tensor]:
    """Rename our weights; their first and third matrix of an expert are one tensor."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    renamed = {}
    for name, value in parameters.items():
        if name.endswith("experts.w3"):
            continue
        if name.endswith("experts.w1"):
            value = torch.cat((value, parameters[name.replace("w1", "w3")]), dim=1)
        for ours, theirs in _THEIR_NAMES.items():
            name = name.replace(ours, theirs)
        renamed["model.norm.weight" if name == "norm.weight" else name] = value
    return renamed
