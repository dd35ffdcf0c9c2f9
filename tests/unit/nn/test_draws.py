"""Keys of random draws: those of layers, sites and samples are independent."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.models.tiny import tiny_decoder, tiny_samples, tiny_spec
from torchtitan_lite.core.rng import mix_tensor, uniform
from torchtitan_lite.nn.attention import BlockContext
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.nn.draws import Site, layer_keys, site_keys
from torchtitan_lite.parallel.pipeline_stages import keep_only

_KEYS_B = torch.arange(4000) * 7919


def test_layers_sites_and_samples_draw_independently() -> None:
    draws = [
        uniform(site_keys(keys_B, site)) < 0.5 for keys_B in layer_keys(_KEYS_B, 3) for site in Site
    ]
    draws.append(draws[0].roll(1))
    for number, first in enumerate(draws):
        # 4,000 draws: a standard deviation of 0.008.
        assert abs(first.float().mean() - 0.5) < 0.03
        for second in draws[:number]:
            assert abs((first == second).float().mean() - 0.5) < 0.03


def test_keys_of_a_layer_do_not_depend_on_the_number_of_layers_or_samples() -> None:
    for layer, keys_B in enumerate(layer_keys(_KEYS_B, 5)):
        assert torch.equal(keys_B, mix_tensor(_KEYS_B + layer))
        assert torch.equal(keys_B[7:9], layer_keys(_KEYS_B[7:9], 7)[layer])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_each_block_gets_the_keys_of_its_layer(dropout: float) -> None:
    samples = tiny_samples()
    expected = dict(zip("012", layer_keys(samples["rng_keys_B"], 3), strict=True))
    keys = _keys_of_blocks(tiny_decoder(dropout=dropout), samples)
    assert keys.keys() == expected.keys()
    for layer, keys_B in keys.items():
        assert torch.equal(keys_B, expected[layer])


def test_blocks_of_a_pipeline_stage_get_the_same_keys() -> None:
    samples = tiny_samples()
    entire, stage = tiny_decoder(), tiny_decoder()
    keep_only(stage, tiny_spec(), ("layers.1", "layers.2", "norm", "output"))
    hidden_BSD = torch.zeros(*samples["tokens_BS"].shape, 18, dtype=torch.float64)
    expected = _keys_of_blocks(entire, samples)
    keys = _keys_of_blocks(stage, {**samples, "tokens_BS": hidden_BSD})
    assert list(keys) == ["1", "2"]
    for layer, keys_B in keys.items():
        assert torch.equal(keys_B, expected[layer])


def _keys_of_blocks(model: Decoder, inputs: Any) -> dict[str, torch.Tensor]:
    keys: dict[str, torch.Tensor] = {}
    for layer, block in model.layers.items():

        def record(block: nn.Module, given: tuple[Any, BlockContext], layer: str = layer) -> None:
            keys[layer] = given[1].rng_keys_B

        block.register_forward_pre_hook(record)
    with torch.no_grad():
        model(**inputs)
    return keys
