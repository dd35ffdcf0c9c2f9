"""An architecture of transformers that is added outside of this repository, as a row of facts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.hugging_face import our_model, tokens
from tests.harness.tolerances import PRETRAINED_LOGITS
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import REGISTRY, register_model
from torchtitan_lite.models import (
    hugging_face_dims,
    hugging_face_model,
    model_spec,
    read_hugging_face_config,
)
from torchtitan_lite.models.auto.missing_parts import _PARTS

_ASSETS = Path(__file__).parents[2] / "assets" / "new_family"


def test_a_row_of_a_users_own_package(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        "cwm",
        hidden_size=48,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        vocab_size=517,
        max_position_embeddings=64,
        sliding_window=9,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )
    theirs: Any = AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    values = read_hugging_face_config(tmp_path)
    with pytest.raises(ConfigError, match='model_type = "cwm" is not one of'):
        hugging_face_dims(values)
    # Types that are known to lack a part may be registered, too.
    monkeypatch.setitem(_PARTS, "cwm", "a row")
    with pytest.raises(ConfigError, match="model_type 'cwm' .* needs a row"):
        hugging_face_dims(values)
    monkeypatch.syspath_prepend(_ASSETS)
    register_model("cwm", "cwm")
    request.addfinalizer(lambda: REGISTRY.models.pop("cwm"))
    few = {key: values[key] for key in values if key not in ("rope_parameters", "sliding_window")}
    _, absent = hugging_face_dims(few)
    assert (absent["rope_theta"], absent["window"]) == (1000000.0, 8192)
    assert absent["rope_scaling"]["factor"] == 16.0
    spec = model_spec(hugging_face_model(values, str(tmp_path)))
    assert spec.name == "cwm" and spec.hugging_face is not None
    written = spec.hugging_face.config
    assert written["model_type"] == "cwm" and written["layer_types"] == values["layer_types"]
    tiny = model_spec(ModelConfig(name="cwm", flavor="tiny")).hugging_face
    assert tiny is not None and tiny.config["sliding_window"] == 32
    tokens_BS = tokens()
    with torch.no_grad():
        logits_BSV = our_model(tmp_path)(
            tokens_BS,
            positions_BS=torch.arange(41).expand(2, -1),
            rng_keys_B=torch.zeros(2, dtype=torch.int64),
        )
        expected_BSV = theirs(tokens_BS).logits
    scale = expected_BSV.std().item()
    torch.testing.assert_close(logits_BSV, expected_BSV, atol=PRETRAINED_LOGITS * scale, rtol=0)
    monkeypatch.setattr("cwm.FLAVORS", {})
    with pytest.raises(ConfigError, match="family cwm has no flavor, of whose type"):
        model_spec(hugging_face_model(values, str(tmp_path)))
