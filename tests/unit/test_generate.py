"""Text from the model as it stands."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.unit.models.tiny import DIMS, WHOLE, tiny_decoder, tiny_spec
from torchtitan_lite.device import detect_device
from torchtitan_lite.generate import generate
from torchtitan_lite.loss import cross_entropy
from torchtitan_lite.mesh import Mesh, start_mesh
from torchtitan_lite.nn.decoder import Decoder
from torchtitan_lite.parallel import OneStage, fsdp
from torchtitan_lite.schema.comm import CommConfig
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.schema.training import PrecisionConfig


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with start_mesh(ParallelismConfig(), CommConfig(), detect_device("cpu")) as started:
        yield started


def test_no_temperature_takes_the_likeliest_token_of_the_window(mesh: Mesh) -> None:
    model = tiny_decoder()
    ids = _generate(model, mesh, temperature=0.0, max_seq_len=5)
    expected = [1, 2, 3]
    for _ in range(8):
        window = torch.tensor([expected[-5:]])
        logits = model(
            window,
            positions_BS=torch.arange(window.shape[1])[None],
            keys_B=torch.zeros(1, dtype=torch.int64),
        )
        expected.append(int(logits[0, -1].argmax()))
    assert ids == expected[3:]


def test_draws_follow_the_seed_alone(mesh: Mesh) -> None:
    model = tiny_decoder()
    torch.manual_seed(1)
    first = _generate(model, mesh)
    torch.manual_seed(2)
    assert _generate(model, mesh) == first
    assert _generate(model, mesh, seed=1) != first
    assert len(first) == 8 and all(0 <= token < DIMS.vocab_size for token in first)


def test_generation_ends_before_the_stop_token(mesh: Mesh) -> None:
    model = tiny_decoder()
    ids = _generate(model, mesh)
    stop = ids[4]
    assert _generate(model, mesh, stop_id=stop) == ids[: ids.index(stop)]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_its_mode_and_draws_without_dropout(
    mesh: Mesh, training: bool
) -> None:
    model = tiny_decoder(dropout=0.5).train(training)
    assert _generate(model, mesh) == _generate(tiny_decoder(), mesh)
    assert model.training == training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sharded_weights_are_freed_afterwards(mesh: Mesh) -> None:
    model = tiny_decoder(torch.float32)
    precision = PrecisionConfig(mixed_precision_param="bfloat16")
    fsdp.apply(model, tiny_spec(), mesh, ParallelismConfig(), precision)
    _generate(model, mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def _generate(model: Decoder, mesh: Mesh, **changes: Any) -> list[int]:
    settings: dict[str, Any] = {
        "num_tokens": 8,
        "max_seq_len": 16,
        "temperature": 1.0,
        "seed": 0,
    }
    schedule = OneStage(model, cross_entropy(), mesh, WHOLE)
    return generate(model, schedule, [1, 2, 3], mesh, **(settings | changes))
