"""gpt-oss: attention with sinks, experts with clamped gates, MXFP4 weights, names in torchtitan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.harness import hugging_face
from tests.harness.hugging_face import make_folder, our_model, tensors_of
from tests.unit.models.tiny import GPT_OSS, tiny_samples
from torchtitan_lite.checkpoint.convert.conversion import expected_shapes
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import dequantize_mxfp4
from torchtitan_lite.cli import main
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import CheckpointError, ConfigError
from torchtitan_lite.models import gpt_oss, model_spec
from torchtitan_lite.nn.attention import SlidingWindow
from torchtitan_lite.nn.attention_sinks import SinkKernel
from torchtitan_lite.nn.decoder_family import build_decoder
from torchtitan_lite.nn.initialize import initialize
from torchtitan_lite.nn.rope import YarnScaling

_LENGTH = 11


def window_mask() -> torch.Tensor:
    places = torch.arange(_LENGTH)
    return SlidingWindow(4).sees(places[:, None], places)[None, None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_sinks_take_part_in_the_softmax(
    dtype: torch.dtype, tolerance: float, is_masked: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True)

    q, k, v, sinks = (
        draw(2, 6, _LENGTH, 8),
        draw(2, 2, _LENGTH, 8),
        draw(2, 2, _LENGTH, 8),
        draw(6),
    )
    mask = window_mask() if is_masked else None
    found = SinkKernel("sdpa")(q, k, v, mask, sinks)
    seen = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).tril() if mask is None else mask
    scores = q @ k.repeat_interleave(3, 1).transpose(2, 3) * 8**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    with_sinks = torch.cat([scores, sinks[:, None, None].expand(2, 6, _LENGTH, 1)], -1)
    expected = with_sinks.softmax(-1)[..., :-1] @ v.repeat_interleave(3, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    weights = torch.randn(found.shape, generator=generator, dtype=dtype)
    inputs = (q, k, v, sinks)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, one in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, one, rtol=0, atol=10 * tolerance)


def test_a_window_has_its_size() -> None:
    mask = window_mask()[0, 0]
    assert mask.sum(1).tolist() == [1, 2, 3, *([4] * (_LENGTH - 3))]
    assert mask[7].nonzero().flatten().tolist() == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match=r"window \(0\) must be at least 1"):
        replace(GPT_OSS, window=0)


def quantized_folder(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a model with its experts in MXFP4, as releases are, and return the folder and the stacks
    as transformers dequantizes them."""
    make_folder(folder, "gpt_oss", dtype=torch.bfloat16, max_shard_size="1GB")
    return folder, quantize(folder)


def quantize(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a folder by random blocks, and return the stacks as transformers
    dequantizes them."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    stacks = {}
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = tensors.pop(key).shape
        shape = (experts, rows, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        stacks[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(values))
    return stacks


def test_mxfp4_is_dequantized_as_in_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, stacks = quantized_folder(tmp_path / "quantized")
    ours = dict(our_model(folder, torch.bfloat16).named_parameters())
    for layer in range(2):
        for name, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            found = ours[f"layers.{layer}.feed_forward.experts.{name}"]
            wanted = stacks[f"model.layers.{layer}.mlp.experts.{theirs}"]
            assert torch.equal(found, wanted.transpose(1, 2).cpu()), (layer, name)

    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    assert main(["convert", "from-hf", str(folder), str(checkpoint)]) == 0
    export = ["convert", "to-hf", str(checkpoint / "step-0"), str(exported)]
    assert main(export) != 0
    assert not exported.exists()
    assert "Pass --dtype bf16" in capsys.readouterr().err
    assert main([*export, "--dtype", "bf16"]) == 0
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    written = tensors_of(exported)
    for key, stack in stacks.items():
        assert torch.equal(written[key], stack.cpu()), key


def test_blocks_that_do_not_divide_a_row_are_rejected(tmp_path: Path) -> None:
    hugging_face.gpt_oss(hidden_size=48).bfloat16().save_pretrained(tmp_path)
    folder = tmp_path
    values = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        stack = tensors.pop(key)
        empty = torch.zeros(stack.shape[0], stack.shape[2], 1, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": empty, f"{key}_scales": empty.clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="blocks of 32 numbers, which do not divide 48"):
        our_model(folder)


def test_every_code_of_mxfp4() -> None:
    numbers = torch.tensor([high << 4 | low for low in range(16) for high in range(16)])
    found = dequantize_mxfp4(numbers.to(torch.uint8), torch.full((16,), 128, dtype=torch.uint8))
    values = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-value for value in values]
    wanted = [2 * values[code] for low in range(16) for high in range(16) for code in (low, high)]
    assert found.tolist() == wanted


@pytest.mark.parametrize("flavor", sorted(gpt_oss.FLAVORS))
def test_costs_and_names_cover_all_parameters(flavor: str) -> None:
    spec = model_spec(ModelConfig(name="gpt_oss", flavor=flavor))
    parameters, buffers = expected_shapes(spec)
    count = sum(torch.Size(shape).numel() for shape in parameters.values())
    assert spec.cost(4096).num_params == count
    released = {"20b": 20.9e9, "120b": 116.8e9}
    if flavor in released:
        assert count == pytest.approx(released[flavor], rel=0.01)
    patterns = {key.name for key in spec.torchtitan_keys}
    for name in parameters | buffers:
        parts = name.split(".")
        parts[1] = "*" if parts[0] == "layers" else parts[1]
        assert ".".join(parts) in patterns, name


def test_a_config_without_rope_has_the_architectures_default() -> None:
    spec = gpt_oss.spec_of(replace(gpt_oss.FLAVORS["tiny"], rope_scaling=None), "plain")
    assert spec.hugging_face is not None
    values = dict(spec.hugging_face.config)
    assert gpt_oss.dims_of_hugging_face(values).rope_scaling is None
    # As transformers reads it.
    del values["rope_scaling"]
    assert gpt_oss.dims_of_hugging_face(values).rope_scaling == YarnScaling(
        factor=32.0, original_max_position=4096, truncate=False
    )


def test_clamped_experts_change_the_result() -> None:
    assert GPT_OSS.moe is not None
    outputs = []
    for limit in (1e-3, 1e3):
        dims = replace(GPT_OSS, moe=replace(GPT_OSS.moe, swiglu_limit=limit))
        model = build_decoder(dims)
        initialize(model, gpt_oss.spec_of(dims, "tiny").init, seed=11)
        samples: Any = tiny_samples()
        outputs.append(model(**samples))
    assert (outputs[0] - outputs[1]).abs().max() > 1e-6
