"""Llama 4: which layers have what, releases with vision, names in torchtitan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.hugging_face import make_folder, our_model, tensors_of
from torchtitan_lite.checkpoint.convert.conversion import expected_shapes
from torchtitan_lite.cli import main
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import llama4, model_spec
from torchtitan_lite.nn.attention import Causal, ChunkWindow
from torchtitan_lite.nn.moe import MoEDims


@pytest.mark.parametrize("flavor", sorted(llama4.FLAVORS))
def test_costs_and_names_cover_all_parameters(flavor: str) -> None:
    spec = model_spec(ModelConfig(name="llama4", flavor=flavor))
    parameters, buffers = expected_shapes(spec)
    count = sum(torch.Size(shape).numel() for shape in parameters.values())
    assert spec.cost(4096).num_params == count
    # Without the vision models of the releases.
    released = {"17bx16e": 107.77e9, "17bx128e": 400.71e9}
    if flavor in released:
        assert count == pytest.approx(released[flavor], rel=0.001)
        assert spec.cost(4096).num_active_params == pytest.approx(17.2e9, rel=0.03)
    patterns = {key.name for key in spec.torchtitan_keys}
    for name in parameters | buffers:
        parts = name.split(".")
        parts[1] = "*" if parts[0] == "layers" else parts[1]
        assert ".".join(parts) in patterns, name


def test_layers_take_turns() -> None:
    layers = llama4.FLAVORS["17bx128e"].layers
    assert [layer.attention.rope is None for layer in layers[:8]] == ([False] * 3 + [True]) * 2
    masks = [layer.attention.mask for layer in layers[:4]]
    assert masks == [ChunkWindow(8192)] * 3 + [Causal()]
    assert [isinstance(layer.feed_forward, MoEDims) for layer in layers[:4]] == [False, True] * 2
    positions = torch.arange(12)
    seen = ChunkWindow(5).sees(positions[:, None], positions)
    assert seen.sum(1).tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]


def test_a_release_with_vision_holds_the_text_model(tmp_path: Path) -> None:
    text = make_folder(tmp_path / "text", "llama4", max_shard_size="1GB")
    alone = our_model(text)
    released = tmp_path / "released"
    released.mkdir()
    tensors = load_file(text / "model.safetensors")
    whole = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    whole["vision_model.patch_embedding.linear.weight"] = torch.zeros(4, 4)
    save_file(whole, released / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": json.loads((text / "config.json").read_text()),
    }
    (released / "config.json").write_text(json.dumps(config))
    for name, parameter in our_model(released).named_parameters():
        assert torch.equal(parameter, alone.get_parameter(name)), name
    # The text model alone is exported.
    assert main(["convert", "from-hf", str(released), str(tmp_path / "ours")]) == 0
    step, back = tmp_path / "ours" / "step-0", tmp_path / "back"
    assert main(["convert", "to-hf", str(step), str(back)]) == 0
    assert json.loads((back / "config.json").read_text())["architectures"] == ["Llama4ForCausalLM"]
    exported = tensors_of(back)
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": [1, 0, 0, 1]}, "only layers at a fixed interval"),
        ({"moe_layers": [0, 3]}, "only the last layers of a fixed interval"),
        ({"layer_types": ["full_attention"] * 4}, "only chunks in the layers with rotary"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2, and only 1 is supported"),
    ],
)
def test_unsupported_layers_are_rejected(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = json.loads((make_folder(tmp_path, "llama4") / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        llama4.dims_of_hugging_face(values | change)


def test_layers_without_rotary_embedding_follow_the_interval_or_the_list(tmp_path: Path) -> None:
    values = json.loads((make_folder(tmp_path, "llama4") / "config.json").read_text())
    values |= {"num_hidden_layers": 8, "no_rope_layer_interval": 4}
    for name in ("no_rope_layers", "moe_layers", "layer_types"):
        values.pop(name, None)
    read = llama4.dims_of_hugging_face(values)
    assert (read.nope_interval, read.first_nope_layer) == (4, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"nope_interval": None},
        {"nope_interval": 8, "first_nope_layer": 3},
        {"nope_interval": 8, "first_nope_layer": 7},
        {"num_layers": 2, "nope_interval": 4, "moe_interval": 3},
        {"moe_interval": 9},
    ],
)
def test_any_intervals_survive_a_config_json(changes: dict[str, Any]) -> None:
    dims = replace(llama4.FLAVORS["tiny"], **changes)
    hugging_face = llama4.spec_of(dims, "changed").hugging_face
    assert hugging_face is not None
    assert hugging_face.differences(hugging_face.config) == []
    read = llama4.dims_of_hugging_face(hugging_face.config)
    assert [layer.attention.mask for layer in read.layers] == [
        layer.attention.mask for layer in dims.layers
    ]
    assert [layer.attention.rope is None for layer in read.layers] == [
        layer.attention.rope is None for layer in dims.layers
    ]


def test_sizes_that_do_not_fit_are_rejected() -> None:
    tiny = llama4.FLAVORS["tiny"]
    for change, message in (
        ({"first_nope_layer": 4}, r"first_nope_layer \(4\) must be at least 0 and below"),
        ({"moe_interval": 0}, r"moe_interval \(0\) must be at least 1"),
        ({"chunk": 0}, r"chunk \(0\) must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(tiny, **change)
