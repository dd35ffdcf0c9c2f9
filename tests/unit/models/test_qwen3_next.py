"""Qwen3-Next: against transformers in float64, released sizes, folders, rules of the optimizer."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.hugging_face import make_folder, our_model, tensors_of
from tests.unit.models.tiny import QWEN3_NEXT, tiny_samples, tiny_targets
from torchtitan_lite.checkpoint.convert.conversion import expected_shapes
from torchtitan_lite.cli import main
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import model_spec, qwen3_next
from torchtitan_lite.nn.attention import Causal
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.gated_delta import GatedDelta, GatedDeltaNet
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.norm import NormKind, ZeroCenteredNorm
from torchtitan_lite.optim.optimizer import uses_muon


def test_the_flavor_has_the_released_sizes() -> None:
    cost = model_spec(ModelConfig(name="qwen3_next", flavor="80B-A3B")).cost(4096)
    # Of the model card; both embeddings are active here.
    assert round(cost.num_params / 1e9) == 80
    assert cost.num_active_params / 1e9 == pytest.approx(3 + 0.6, abs=0.4)
    layers = qwen3_next.FLAVORS["80B-A3B"].layers
    assert [isinstance(layer.attention, GatedDelta) for layer in layers[:8]] == (
        [True] * 3 + [False]
    ) * 2


@pytest.mark.parametrize("flavor", sorted(qwen3_next.FLAVORS))
def test_the_cost_counts_every_parameter(flavor: str) -> None:
    spec = model_spec(ModelConfig(name="qwen3_next", flavor=flavor))
    parameters, _ = expected_shapes(spec)
    assert spec.cost(4096).num_params == sum(torch.Size(s).numel() for s in parameters.values())


def _drawn(dims: qwen3_next.Qwen3NextDims = QWEN3_NEXT) -> Decoder:
    spec = qwen3_next.spec_of(dims, "tiny")
    model = spec.build()
    assert isinstance(model, Decoder)
    initialize(model, spec.init, seed=3)
    return model.double()


def test_initial_norms_are_the_identity_and_decays_are_spread() -> None:
    model = _drawn()
    centered = [one for one in model.modules() if isinstance(one, ZeroCenteredNorm)]
    # Two per layer, the last one, and those of queries and keys.
    assert len(centered) == 2 * 4 + 1 + 2 * 2
    assert all(not one.weight.any() for one in centered)
    for layer in model.modules():
        if isinstance(layer, GatedDeltaNet):
            rates = layer.A_log.weight.exp()
            assert (rates > 0.01).all() and (rates < 16).all() and rates.std() > 1
            assert (layer.dt_bias.weight == 1).all() and (layer.head_norm.weight == 1).all()


def test_the_number_of_positions_of_a_chunk_does_not_change_the_loss() -> None:
    samples, targets_BS = tiny_samples(length=21), tiny_targets(length=21)
    losses = [
        _drawn(replace(QWEN3_NEXT, chunk_size=size))(
            **samples, targets_BS=targets_BS, loss=cross_entropy()
        ).item()
        for size in (1, 4, 64)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_no_mask_is_made_for_a_stage_of_recurrences() -> None:
    model = _drawn()
    contexts = model.contexts(torch.arange(5)[None], torch.zeros(1).long(), None)
    assert [mask.kind for mask in model.masks] == [Causal()]
    assert contexts["0"].mask is None and contexts["0"].cos_BS1E is None


def test_rules_of_the_optimizer() -> None:
    spec = qwen3_next.spec_of(QWEN3_NEXT, "tiny")
    parameters, _ = expected_shapes(spec)

    def chosen(patterns: tuple[str, ...]) -> set[str]:
        return {
            name.removeprefix("layers.0.")
            for name in parameters
            if any(fnmatchcase(name, pattern) for pattern in patterns)
            and not name.startswith(("layers.1", "layers.2", "layers.3"))
        }

    start = "attention."
    assert chosen(spec.no_decay) == {
        "tok_embeddings.weight",
        *(f"{start}{name}.weight" for name in ("A_log", "dt_bias", "head_norm")),
    }
    matrices = {
        name
        for name, shape in parameters.items()
        if uses_muon(name, torch.empty(shape, device="meta"), spec.muon_exclusions)
    }
    assert {name for name in matrices if name.startswith("layers.0.")} == {
        *(f"layers.0.{start}{name}.weight" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")),
        *(f"layers.0.feed_forward.experts.w{number}" for number in (1, 2, 3)),
        *(f"layers.0.feed_forward.shared.w{number}.weight" for number in (1, 2, 3)),
    }


def test_weights_of_further_predictions_are_ignored(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "released", "qwen3_next", max_shard_size="1GB")
    alone, tensors = our_model(folder), load_file(folder / "model.safetensors")
    tensors |= {"mtp.fc.weight": torch.zeros(48, 96), "mtp.norm.weight": torch.zeros(48)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, parameter in our_model(folder).named_parameters():
        assert torch.equal(parameter, alone.get_parameter(name)), name
    assert main(["convert", "from-hf", str(folder), str(tmp_path / "ours")]) == 0
    step, back = tmp_path / "ours" / "step-0", tmp_path / "back"
    assert main(["convert", "to-hf", str(step), str(back)]) == 0
    written = tensors_of(back)
    assert written.keys() == {key for key in tensors if not key.startswith("mtp.")}
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in written.items())
    with pytest.raises(ConfigError, match=r"model.mtp_depth \(1\): .* has no multi-token"):
        model_spec(ModelConfig(name="qwen3_next", flavor="tiny", mtp_depth=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["linear_attention", "full_attention", "full_attention", "x"]},
            "only full_attention in the last layer of each of a fixed number",
        ),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], and only \[\] or None"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, and only 1 is supported"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, and a whole number"),
        ({"linear_num_key_heads": 4}, r"value heads \(6\) as key heads \(4\), or a multiple"),
        ({"attention_bias": True}, "attention_bias is True, and only False is supported"),
    ],
)
def test_unsupported_settings_are_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = json.loads((make_folder(tmp_path, "qwen3_next") / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        qwen3_next.dims_of_hugging_face(values | change)


def test_a_release_without_layer_types_is_read(tmp_path: Path) -> None:
    values = json.loads((make_folder(tmp_path, "qwen3_next_half") / "config.json").read_text())
    expected = qwen3_next.dims_of_hugging_face(values)
    older = {key: value for key, value in values.items() if key != "rope_parameters"}
    del older["layer_types"]
    older |= {
        "full_attention_interval": 2,
        "rope_theta": 20000.0,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
    }
    assert qwen3_next.dims_of_hugging_face(older) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_attention_interval": 5}, r"full_attention_interval \(5\) must be between 1 and"),
        ({"rotated_share": 1.5}, r"rotated_share \(1.5\) must be above 0 and at most 1"),
        ({"rotated_share": 0.3}, r"width of a head \(3\) must be even"),
        ({"linear_num_value_heads": 3}, "or a multiple of them"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(QWEN3_NEXT, **changes)


def test_a_gate_without_shared_experts_is_rejected() -> None:
    with pytest.raises(ConfigError, match="shared_gate = true needs shared experts"):
        replace(QWEN3_NEXT.moe, shared_hidden_dim=0)
    plain = replace(QWEN3_NEXT, moe=replace(QWEN3_NEXT.moe, shared_gate=False))
    assert qwen3_next.spec_of(plain, "tiny").hugging_face is None


def test_a_bfloat16_norm_keeps_small_weights() -> None:
    norm: Any = NormKind(zero_centered=True).build(8, 1e-6).bfloat16()
    # 1 + 2**-9 is 1 in bfloat16.
    torch.nn.init.constant_(norm.weight, 2.0**-9)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.nn.functional.rms_norm(x.double(), (8,), eps=1e-6) * (1 + 2.0**-9)
    assert torch.equal(norm(x), expected.bfloat16())
