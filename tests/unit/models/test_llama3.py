"""Llama 3: sizes, cost, tied embeddings, and lookup of a family by name."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.tolerances import COUNTED_FLOPS
from tests.unit.models.tiny import DIMS, tiny_decoder, tiny_samples, tiny_spec, tiny_targets
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import families, llama3, model_spec
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.decoder_family import build_decoder
from torchtitan_lite.nn.dropout import KeyedDropout
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.loss import cross_entropy


@pytest.mark.parametrize(
    ("flavor", "billions"),
    [("1B", 1.236), ("3B", 3.213), ("8B", 8.030), ("70B", 70.554), ("405B", 405.853)],
)
def test_released_sizes_have_the_parameters_of_the_paper(flavor: str, billions: float) -> None:
    num_params = _num_params(_on_meta(flavor))
    assert round(num_params / 1e9, 3) == billions


@pytest.mark.parametrize("flavor", sorted(llama3.FLAVORS))
def test_the_cost_of_a_flavor_counts_the_parameters_of_its_module(flavor: str) -> None:
    spec = model_spec(ModelConfig(flavor=flavor))
    model = _on_meta(flavor)
    assert all(parameter.is_meta for parameter in model.parameters())
    cost = spec.cost(4096)
    assert cost.num_params == cost.num_active_params == _num_params(model)
    assert len(model.layers) == spec.num_layers
    assert model.output.weight.shape == (spec.vocab_size, spec.dims.dim)


@pytest.mark.parametrize("flavor", sorted(llama3.FLAVORS))
def test_the_rules_of_a_flavor_initialize_every_parameter(flavor: str) -> None:
    model = _on_meta(flavor)
    # One row of each parameter is enough to see that its rule fits.
    small = nn.Module()
    for name, parameter in model.named_parameters():
        _put(small, name, nn.Parameter(torch.full((1, *parameter.shape[1:]), torch.nan)))
    initialize(small, model_spec(ModelConfig(flavor=flavor)).init, seed=0)
    for name, parameter in small.named_parameters():
        assert parameter.isfinite().all(), name
        assert ("norm" in name) == bool((parameter == 1).all()), name


def test_residual_projections_start_smaller_in_deeper_layers() -> None:
    dims = replace(DIMS, dim=128, head_dim=16, hidden_dim=256)
    model = build_decoder(dims)
    initialize(model, llama3.spec_of(dims, "wide").init, seed=0)
    weights = dict(model.named_parameters())
    cut_at_3 = 0.9866  # Deviation of a normal distribution truncated at three deviations.
    for layer in range(3):
        for matrix in ("attention.wo", "feed_forward.w2", "feed_forward.w3"):
            std = weights[f"layers.{layer}.{matrix}.weight"].std().item()
            assert std == pytest.approx(cut_at_3 * 0.02 / math.sqrt(2 * (layer + 1)), rel=0.03)
        for matrix in ("attention.wq", "attention.wk", "feed_forward.w1"):
            std = weights[f"layers.{layer}.{matrix}.weight"].std().item()
            assert std == pytest.approx(cut_at_3 * 0.02, rel=0.05)
    assert weights["output.weight"].std().item() == pytest.approx(cut_at_3 / 128**0.5, rel=0.03)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_equal_torchs_count(tied: bool) -> None:
    batch_size, length = 2, 24
    model = tiny_decoder(tied_embeddings=tied)
    targets_BS = tiny_targets(batch_size, length)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(
            **tiny_samples(batch_size, length), targets_BS=targets_BS, loss=cross_entropy()
        )
        loss.backward()
    counted = counter.get_flop_counts()["Global"]
    attention = counted[torch.ops.aten.bmm]
    num_tokens = batch_size * length
    # Without a fused kernel attention is batched products over all pairs of positions; the model's
    # cost counts the half of them that a causal mask needs.
    pairs = 2 * num_tokens * length * DIMS.num_heads * DIMS.head_size * DIMS.num_layers
    assert attention == (2 + 4) * pairs
    expected = sum(counted.values()) - attention / 2
    cost = tiny_spec(tied_embeddings=tied).cost(length)
    assert cost.flops_per_token * num_tokens == pytest.approx(expected, rel=COUNTED_FLOPS)


def test_tied_embeddings_stay_one_parameter_when_the_model_moves() -> None:
    with torch.device("meta"):
        model = build_decoder(replace(DIMS, tied_embeddings=True))
    model.to_empty(device="cpu")
    assert model.output.weight is model.tok_embeddings.weight
    model.double()
    assert model.output.weight is model.tok_embeddings.weight
    assert "output.weight" not in dict(model.named_parameters())


def test_tied_embeddings_get_the_gradients_of_both_uses() -> None:
    tied, untied = tiny_decoder(tied_embeddings=True), tiny_decoder()
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        model(**tiny_samples(), targets_BS=tiny_targets(), loss=cross_entropy()).backward()
    both = untied.tok_embeddings.weight.grad + untied.output.weight.grad  # pyright: ignore
    torch.testing.assert_close(tied.tok_embeddings.weight.grad, both)


def test_the_output_loss_equals_the_loss_of_its_logits() -> None:
    model, targets_BS = tiny_decoder(), tiny_targets()
    loss = model(**tiny_samples(), targets_BS=targets_BS, loss=cross_entropy())
    logits_BSV = model(**tiny_samples())
    expected = nn.functional.cross_entropy(
        logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum"
    )
    torch.testing.assert_close(loss, expected)


def test_dropout_acts_on_every_block_in_training_only() -> None:
    model, plain = tiny_decoder(dropout=0.3), tiny_decoder()
    plain.load_state_dict(model.state_dict())
    masks: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, KeyedDropout):
            module.register_forward_hook(lambda _m, _args, out: masks.append(torch.eq(out, 0)))
    model(**tiny_samples())
    assert len(masks) == 2 * DIMS.num_layers
    for a, b in combinations(masks, 2):
        assert 0.2 < a.float().mean() < 0.4
        # Two independent masks agree in 0.7^2 + 0.3^2 of the elements.
        assert 0.52 < (a == b).float().mean() < 0.64
    assert not torch.equal(model(**tiny_samples()), plain(**tiny_samples()))
    assert torch.equal(model.eval()(**tiny_samples()), plain.eval()(**tiny_samples()))


def test_the_config_overrides_the_attention_of_a_flavor() -> None:
    assert model_spec(ModelConfig(flavor="tiny")).document_mask
    plain = ModelConfig(flavor="tiny", attention_mask="causal", attention_backend="flex")
    assert not model_spec(plain).document_mask
    assert model_spec(plain).dims.attention_backend == "flex"
    assert model_spec(ModelConfig(flavor="debugmodel_flex_attn")).dims.attention_backend == "flex"


def test_an_unknown_family_or_flavor_lists_known_names_and_the_nearest() -> None:
    known = families()
    assert {"auto", "llama3"} < set(known)
    with pytest.raises(ConfigError) as error:
        model_spec(ModelConfig(name="lama3"))
    listed = ", ".join(known)
    assert str(error.value).startswith(f'model.name = "lama3" is not one of {listed}.')
    assert 'Did you mean "llama3"? Another one is registered by' in str(error.value)
    with pytest.raises(ConfigError, match=r'"debugmodl" is not one of tiny, .*"debugmodel"\?'):
        model_spec(ModelConfig(flavor="debugmodl"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, r"num_kv_heads \(4\) must divide num_heads \(6\)"),
        ({"dim": 20, "head_dim": None}, r"num_heads \(6\) must divide dim \(20\)"),
        ({"head_dim": 9}, r"width of a head \(9\) must be even"),
    ],
)
def test_invalid_dimensions_are_rejected(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(DIMS, **changes)


def test_a_dropout_rate_of_one_is_rejected() -> None:
    for share in (1.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="dropout"):
            ModelConfig(dropout=share)


def _on_meta(flavor: str) -> Decoder:
    with torch.device("meta"):
        model = model_spec(ModelConfig(flavor=flavor)).build()
    assert isinstance(model, Decoder)
    return model


def _num_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _put(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register `parameter` in a tree of bare modules under its full name."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(leaf, parameter)
