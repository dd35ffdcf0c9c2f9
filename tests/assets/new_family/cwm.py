"""An architecture of transformers as a row of facts, as a user would add it outside of `models/`:
Meta's Code World Model, whose layers have a window but for each fourth one."""

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.models.auto.dims import AutoDims
from torchtitan_lite.models.auto.rows import ACTIVATION, MLP_BIAS, WIDTH, base_facts, row
from torchtitan_lite.nn.grouped_decoder import GroupedDecoderFamily
from torchtitan_lite.nn.hugging_face.facts import HeadWidth
from torchtitan_lite.nn.hugging_face.position_facts import (
    LayerWindows,
    Rotation,
    all_but_first_of_each,
)
from torchtitan_lite.nn.rope import RopeScaling
from torchtitan_lite.nn.spec import ModelSpec

FLAVORS = {
    "tiny": AutoDims(
        model_type="cwm",
        dim=128,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=384,
        vocab_size=2048,
        window=32,
        windowed_layers=(1, 2, 3),
    ),
}
_FAMILY = GroupedDecoderFamily(
    name="cwm",
    dims=AutoDims,
    architectures=(
        row(
            "CwmForCausalLM",
            "cwm",
            *base_facts(norm_eps=1e-5, num_kv_heads=8),
            MLP_BIAS,
            HeadWidth(128),
            WIDTH,
            ACTIVATION,
            LayerWindows(8192, all_but_first_of_each(4), switch=None),
            Rotation(1000000.0, default_scaling=RopeScaling(factor=16.0)),
        ),
    ),
    is_in_torchtitan=False,
)
ARCHITECTURES = _FAMILY.model_types
spec_of = _FAMILY.spec_of
dims_of_hugging_face = _FAMILY.dims_of_hugging_face


def model_spec(config: ModelConfig) -> ModelSpec:
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)
