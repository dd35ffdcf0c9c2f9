"""Pretrained models of transformers, loaded into this project's models: same logits, loss and
gradients."""

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.harness.float64 import in_float64
from tests.harness.hugging_face import (
    FAMILIES,
    VOCAB_SIZE,
    add_tokenizer,
    family_rows,
    make_folder,
    make_model,
    our_model,
    save_config,
    save_gradients,
    tokens,
    update_config,
)
from tests.harness.jobs import FIXTURE
from tests.harness.tolerances import (
    PRETRAINED_DELTA,
    PRETRAINED_FLOAT64,
    PRETRAINED_FLOAT64_GRADIENTS,
    PRETRAINED_GRADIENTS,
    PRETRAINED_LOGITS,
)
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.loading import open_snapshot
from torchtitan_lite.checkpoint.snapshots import read_tensor
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.config import Config
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import (
    families,
    hugging_face_dims,
    hugging_face_model,
    mixtral,
    model_spec,
    plain_dims,
    read_hugging_face_config,
)
from torchtitan_lite.models.auto import FLAVORS as AUTO
from torchtitan_lite.models.llama3 import FLAVORS as LLAMA
from torchtitan_lite.models.qwen3 import FLAVORS, spec_of
from torchtitan_lite.nn.loss import cross_entropy
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.training.checks.constraints import check_against
from torchtitan_lite.training.run_config import load_config

RELEASED = [
    (family, flavor)
    for family in families()
    for flavor in import_module(f"torchtitan_lite.models.{family}").FLAVORS
]
"""Read when tests are collected: other tests add flavors."""
_MODEL_TYPES = [
    model_type
    for family in families()
    for model_type in import_module(f"torchtitan_lite.models.{family}").ARCHITECTURES.values()
]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(*row.values, dtype, marks=row.marks)
        for row in family_rows()
        for dtype in (torch.float32, torch.float64)
    ],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In float64, transformers' own casts to float32 are to float64."""
    is_wide, is_recurrent = dtype == torch.float64, family.startswith("qwen3_next")
    of_logits, of_gradients = PRETRAINED_LOGITS, PRETRAINED_GRADIENTS
    if is_recurrent:
        of_logits = of_gradients = PRETRAINED_DELTA
    if is_wide:
        of_logits, of_gradients = PRETRAINED_FLOAT64, PRETRAINED_FLOAT64_GRADIENTS
    ours = our_model(make_folder(tmp_path / "hf", family, dtype=dtype), dtype).train()
    theirs = make_model(family, dtype)
    tokens_BS = tokens()
    targets_BS = tokens_BS.roll(-1, 1)
    targets_BS[:, -1] = -100
    context: dict[str, Any] = {
        "positions_BS": torch.arange(41).expand(2, -1),
        "rng_keys_B": torch.zeros(2, dtype=torch.int64),
    }
    with in_float64() if is_wide else nullcontext():
        logits_BSV = ours(tokens_BS, **context)
        expected_BSV = theirs(tokens_BS).logits
        loss = ours(tokens_BS, **context, targets_BS=targets_BS, loss=cross_entropy()) / 80
        expected = F.cross_entropy(expected_BSV.flatten(0, 1), targets_BS.flatten())
        loss.backward()
        expected.backward()
    scale = expected_BSV.std().item()
    assert scale > 1
    torch.testing.assert_close(logits_BSV, expected_BSV, atol=of_logits * scale, rtol=0)
    torch.testing.assert_close(loss, expected, atol=min(of_logits, PRETRAINED_LOGITS), rtol=0)

    wanted = dict(our_model(save_gradients(theirs, tmp_path / "grad"), dtype).named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < of_gradients, (name, error)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_stacked_experts_load_too(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stacked = our_model(tmp_path / "stacked")
    alone = our_model(make_folder(tmp_path / "alone", family))
    header = (tmp_path / "stacked" / "model.safetensors").read_bytes()[:20000]
    assert b"experts.gate_up_proj" in header and b"experts.0." not in header
    _assert_equal(stacked, alone)


def _assert_equal(one: nn.Module, other: nn.Module) -> None:
    of_one, of_other = one.state_dict(), other.state_dict()
    assert of_one.keys() == of_other.keys()
    assert all(torch.equal(of_one[name], of_other[name]) for name in of_one)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_json_survives_a_round_trip(family: str, tmp_path: Path) -> None:
    save_config(tmp_path, family)
    values = read_hugging_face_config(tmp_path)
    name, dims = hugging_face_dims(values)
    # As recorded in a manifest.
    dims = json.loads(json.dumps(dims))
    spec = model_spec(ModelConfig(name=name, flavor="hf", dims=dims))
    assert spec.hugging_face is not None
    assert spec.hugging_face.differences(values) == []
    assert hugging_face_dims(spec.hugging_face.config) == (name, dims)


@pytest.mark.parametrize(("family", "flavor"), RELEASED)
def test_every_released_flavor_has_a_config_json(family: str, flavor: str) -> None:
    spec = model_spec(ModelConfig(name=family, flavor=flavor))
    assert spec.hugging_face is not None
    assert spec.hugging_face.differences(spec.hugging_face.config) == []
    # A run that takes the model from the exported folder gets the same one.
    read = model_spec(hugging_face_model(spec.hugging_face.config, "folder"))
    assert read.hugging_face is not None
    assert read.hugging_face.differences(spec.hugging_face.config) == []
    assert read.hugging_face.config == spec.hugging_face.config


def test_unsupported_routing_is_not_exported() -> None:
    dims = replace(
        FLAVORS["tiny_moe"],
        moe=MoEDims(num_experts=4, top_k=2, hidden_dim=8, shared_hidden_dim=8),
    )
    assert spec_of(dims, "shared").hugging_face is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "mixtral", "llama4", "deepseek_v3"])
def test_losses_of_the_router_do_not_prevent_an_export(family: str) -> None:
    flavor = next(
        name
        for name, dims in import_module(f"torchtitan_lite.models.{family}").FLAVORS.items()
        if dims.moe is not None
    )
    config = ModelConfig(
        name=family,
        flavor=flavor,
        router_balance_loss_weight=0.01,
        router_z_loss_weight=0.01,
        router_bias_update_rate=0.01,
    )
    assert model_spec(config).hugging_face is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["A"], "model_type": "b"},
            'model_type = "b" is not one of arcee, aria_text',
        ),
        ({"model_type": None}, 'model_type = "" is not one of arcee'),
        ({"attention_bias": 1}, "attention_bias is 1, and true or false is needed"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 2.0}}, "rope_type is 'axial'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 2.0}}, "factor of RoPE (yarn)"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "turn": 3}}, "turn (3) of RoPE (linear)"),
        ({"hidden_size": "48"}, "config.json: the model cannot be built here: hidden_size is '48'"),
        ({"num_key_value_heads": 4}, "config.json: num_kv_heads (4) must divide"),
    ],
)
def test_unsupported_models_are_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_config(tmp_path, "llama")
    values = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    (tmp_path / "run.toml").write_text(f'[model]\nflavor = "hf"\nhf_assets_path = "{tmp_path}"\n')
    with pytest.raises(ConfigError) as caught:
        model_spec(load_config(tmp_path / "run.toml").model)
    assert message in str(caught.value)


def test_the_width_of_heads_follows_from_the_model_if_it_is_not_given(tmp_path: Path) -> None:
    values = json.loads((make_folder(tmp_path, "mixtral") / "config.json").read_text())
    values.pop("head_dim", None)
    heads = values["num_attention_heads"]
    assert mixtral.dims_of_hugging_face(values).head_dim == values["hidden_size"] // heads > 1


def test_former_names_of_rope_settings_are_read(tmp_path: Path) -> None:
    save_config(tmp_path, "llama_tied_stretched")
    values = read_hugging_face_config(tmp_path)
    rope = values.pop("rope_parameters")
    before = {**values, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    expected = hugging_face_dims(values | {"rope_parameters": {**rope, "rope_theta": 10000.0}})
    assert hugging_face_dims(before) == expected
    assert expected[1]["rope_scaling"]["original_max_position"] == 16


def test_a_family_that_differs_from_the_folder_is_rejected(tmp_path: Path) -> None:
    save_config(tmp_path, "qwen3")
    (tmp_path / "run.toml").write_text(
        f'[model]\nname = "llama3"\nflavor = "hf"\nhf_assets_path = "{tmp_path}"\n'
    )
    with pytest.raises(ConfigError, match='name is "llama3", but .*config.json is of "qwen3"'):
        load_config(tmp_path / "run.toml")


@pytest.mark.parametrize(
    "named",
    ["", 'flavor = "hf"', 'name = "auto"', 'name = "auto"\nflavor = "hf"'],
)
def test_a_folder_alone_is_the_model(named: str, tmp_path: Path) -> None:
    save_config(tmp_path, "llama")
    (tmp_path / "run.toml").write_text(f'[model]\nhf_assets_path = "{tmp_path}"\n{named}\n')
    model = load_config(tmp_path / "run.toml").model
    assert (model.name, model.flavor, model.dims["dim"]) == ("llama3", "hf", 48)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ('name = "qwen3"', ("qwen3", "debugmodel")),
        ('flavor = "tiny"', ("llama3", "tiny")),
        ('name = "auto"\nflavor = "tiny"', ("auto", "tiny")),
    ],
)
def test_a_named_model_takes_only_the_tokenizer_of_a_folder(
    named: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    save_config(tmp_path, "llama")
    (tmp_path / "run.toml").write_text(f'[model]\nhf_assets_path = "{tmp_path}"\n{named}\n')
    model = load_config(tmp_path / "run.toml").model
    assert (model.name, model.flavor, model.dims) == (*expected, {})


def test_a_folder_with_a_tokenizer_only_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[model]\nhf_assets_path = "{tmp_path}"\n')
    model = load_config(tmp_path / "run.toml").model
    assert (model.name, model.flavor) == ("llama3", "debugmodel")


def test_sizes_of_an_unknown_flavor_are_checked() -> None:
    for dims, message in (
        ({"dim": 8, "width": 3}, "model.dims of llama3 has width. Known are"),
        ({"dim": "8"}, "model.dims of llama3: "),
        (
            plain_dims(LLAMA["tiny"]) | {"rope_scaling": {"factor": 2.0, "beta_fast": 1.0}},
            "model.dims of llama3: rope_scaling.beta_fast is not one of factor, low_freq_factor",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            model_spec(ModelConfig(flavor="mine", dims=dims))


@pytest.mark.parametrize(
    ("family", "pad_token_id"),
    [
        *(
            pytest.param(family, 3, marks=pytest.mark.matrix)
            for family in FAMILIES
            if family != "llama_tied_stretched"
        ),
        *(("llama_tied_stretched", pad_token_id) for pad_token_id in (-2, 3, 10**6)),
        *(("llama", pad_token_id) for pad_token_id in (-2, 10**6)),
    ],
)
def test_the_embedding_of_padding_gets_the_gradient_of_transformers(
    family: str, pad_token_id: int, tmp_path: Path
) -> None:
    """None as an input; if tied, that of the output."""
    folder = make_folder(tmp_path / "hf", family)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    update_config(folder, pad_token_id=pad_token_id)
    if pad_token_id < VOCAB_SIZE:
        # Ids without an embedding are an error in transformers.
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours: Any = our_model(folder)
    tokens_BS = tokens()
    tokens_BS[:, ::5] = pad_token_id % VOCAB_SIZE
    theirs(tokens_BS).logits.square().sum().backward()
    positions_BS = torch.arange(tokens_BS.shape[1]).expand(2, -1)
    keys_B = torch.zeros(2, dtype=torch.int64)
    ours(tokens_BS, positions_BS=positions_BS, rng_keys_B=keys_B).square().sum().backward()
    expected, actual = theirs.get_input_embeddings().weight.grad, ours.tok_embeddings.weight.grad
    scale = expected.abs().max()
    is_recurrent = family.startswith("qwen3_next")
    tolerance = PRETRAINED_DELTA if is_recurrent else PRETRAINED_GRADIENTS
    torch.testing.assert_close(actual / scale, expected / scale, atol=tolerance, rtol=0)
    row = actual[pad_token_id % VOCAB_SIZE]
    is_input = theirs.get_input_embeddings().padding_idx is None
    assert row.any() == (is_input or theirs.config.tie_word_embeddings)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss", "mixtral"])
def test_all_that_is_not_supported_is_named_for_each_family(family: str, tmp_path: Path) -> None:
    save_config(tmp_path, family)
    values = json.loads((tmp_path / "config.json").read_bytes())
    changes = {"hidden_size": "48", "hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ConfigError) as caught:
        hugging_face_dims(read_hugging_face_config(tmp_path))
    for problem in ("hidden_size is '48'", "hidden_act is 'gelu'"):
        assert problem in str(caught.value)


def _starts_in_hf(folder: Path, *more: str, overrides: Sequence[str] = ()) -> Config:
    (folder / "run.toml").write_text(
        f'[model]\nflavor = "hf"\nhf_assets_path = "{folder}"\n'
        "[checkpoint]\nenable = true\ninitial_load_in_hf = true\n" + "\n".join(more)
    )
    return load_config(folder / "run.toml", overrides)


def test_weights_come_from_the_folder_of_the_model_as_in_torchtitan(tmp_path: Path) -> None:
    make_folder(tmp_path, "llama")
    assert _starts_in_hf(tmp_path).checkpoint.initial_load_path == str(tmp_path)
    other = _starts_in_hf(tmp_path, 'initial_load_path = "elsewhere"')
    assert other.checkpoint.initial_load_path == "elsewhere"
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match="initial_load_in_hf.* has neither model.safetensors nor"):
        _starts_in_hf(tmp_path)


def test_adapters_that_peft_cannot_load_are_refused_before_they_are_trained(tmp_path: Path) -> None:
    save_config(tmp_path, "glm")
    add_tokenizer(tmp_path)
    asked = (
        "last_save_in_hf = true",
        f'initial_load_path = "{tmp_path}"',
        '[job]\ndevice = "cpu"',
        f'[training]\nseq_len = 32\ndataset_path = "{FIXTURE}"',
        "[lora]",
    )
    with_adapters = ["--model.converters=lora", "--checkpoint.initial_load_in_hf=false"]
    config = _starts_in_hf(tmp_path, *asked, overrides=with_adapters)
    with pytest.raises(ConfigError, match=r"layers.0.feed_forward.w1 is not a linear layer of its"):
        check_against(config, 1)
    targets = 'targets = ["feed_forward.w2", "attention.wo"]'
    check_against(_starts_in_hf(tmp_path, *asked, targets, overrides=with_adapters), 1)


def test_a_checkpoint_is_not_taken_for_a_hugging_face_folder(tmp_path: Path) -> None:
    make_folder(tmp_path, "llama")
    (tmp_path / "step-3").mkdir()
    config = _starts_in_hf(tmp_path, f'initial_load_path = "{tmp_path}/step-3"')
    with pytest.raises(ConfigError, match="step-3. is not a Hugging Face folder. Leave"):
        check_against(config, 1)


@pytest.mark.parametrize(
    ("family", "absent", "wanted"),
    [
        ("qwen3", "head_dim", {"head_dim": 128}),
        ("qwen3_moe", "head_dim", {"head_dim": 8}),
        ("seed_oss", "head_dim", {"head_dim": 128}),
        ("mistral", "head_dim", {}),
        ("mistral", "sliding_window", {"window": 4096}),
        ("smollm3_windows", "no_rope_layers", {"layers_without_rope": [1, 3]}),
        ("smollm3", "tie_word_embeddings", {"tied_embeddings": True}),
        ("seed_oss", "attention_bias", {"bias": True}),
    ],
)
def test_absent_keys_take_the_default_of_the_architecture(
    family: str, absent: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    save_config(tmp_path, family)
    values = read_hugging_face_config(tmp_path)
    values.pop(absent, None)
    _, dims = hugging_face_dims(values)
    assert {name: dims[name] for name in wanted} == wanted
    assert absent != "head_dim" or wanted or "head_dim" not in dims


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types is .*for each layer is needed"),
        ({"layer_types": ["chunked", "full_attention"]}, "layer_types is .*chunked"),
        ({"no_rope_layers": [1, 2]}, "no_rope_layers is .*0 or 1 for each layer"),
        ({"hidden_act": "mish"}, "hidden_act is .mish., and one of silu"),
    ],
)
def test_layers_that_are_not_understood_are_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_config(tmp_path, "smollm3")
    with pytest.raises(ConfigError, match=message):
        hugging_face_dims(read_hugging_face_config(tmp_path) | change)


def test_model_types_of_auto_are_named() -> None:
    dims = plain_dims(AUTO["tiny"]) | {"model_type": "mpt"}
    with pytest.raises(
        ConfigError, match="model_type = .mpt. is not one of arcee, aria_text, cohere, "
    ):
        model_spec(ModelConfig(name="auto", flavor="mine", dims=dims))


def test_a_tied_output_has_no_bias() -> None:
    with pytest.raises(ConfigError, match="no bias of its own .output_bias."):
        replace(AUTO["tiny"], tied_embeddings=True, output_bias=True)


_NOT_LOADED: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("model.layers.2.eh_proj.weight",),
    "ernie4_5_moe": ("model.mtp_linear_proj.0.weight",),
    "exaone_moe": ("mtp.fc.weight",),
    "glm4_moe": ("model.layers.2.eh_proj.weight",),
    "gpt_neox": tuple(
        f"gpt_neox.layers.1.attention.{name}"
        for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
    ),
    "gptj": ("transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias"),
    "mellum": ("mtp.fc.weight",),
    "qwen3_next": ("mtp.fc.weight",),
}
"""By architecture, keys of releases that transformers does not load: multi-token prediction, masks
and frequencies. Layers 0 and 1 are those of the model."""


@pytest.mark.parametrize("family", _NOT_LOADED)
def test_what_transformers_does_not_load_is_ignored(family: str, tmp_path: Path) -> None:
    keys = sorted(_NOT_LOADED[family])
    folder = make_folder(tmp_path, family, max_shard_size="1GB")
    file = folder / "model.safetensors"
    more = {key: torch.ones(4, 4, dtype=torch.bool) for key in keys}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    snapshot = open_snapshot(*open_parent_storage(str(folder)), spec)
    assert isinstance(snapshot, HuggingFaceSnapshot) and sorted(snapshot.ignored) == keys


def test_all_that_transformers_does_not_load_is_among_these_keys() -> None:
    for model_type in _MODEL_TYPES:
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        for pattern in kind._keys_to_ignore_on_load_unexpected or ():
            # Layers behind the last one of the releases.
            of_two_layers = re.sub(r"(layers\\\.)\d+", r"\g<1>2", pattern)
            assert any(re.search(of_two_layers, key) for key in _NOT_LOADED.get(model_type, ())), (
                f"add a key of {model_type} that matches {of_two_layers} to _NOT_LOADED"
            )


def test_what_a_folder_lacks_is_zero_in_float32(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    snapshot = open_snapshot(*open_parent_storage(str(folder)), spec)
    bias_X = read_tensor(snapshot, "model.layers.0.feed_forward.router.expert_bias_X")
    assert bias_X.dtype == torch.float32 and not bias_X.any()
