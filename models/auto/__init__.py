"""Decoders of transformers that differ in facts only. `config.json` decides: each `model_type` is a
row of `gated.py`, `plain.py` or `experts.py`."""

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import unknown_name
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.models.auto.dims import ARCHITECTURES as _ROWS
from torchtitan_lite.models.auto.dims import AutoDims
from torchtitan_lite.nn.grouped_decoder import GroupedDecoderFamily
from torchtitan_lite.nn.spec import ModelSpec

FLAVORS = {
    # 1.3 M parameters with everything that the architectures have.
    "tiny": AutoDims(
        model_type="qwen2",
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=384,
        vocab_size=2048,
        bias=True,
        window=32,
        windowed_layers=(1, 3),
        document_mask=True,
    ),
}
_FAMILY = GroupedDecoderFamily(
    name="auto", dims=AutoDims, architectures=_ROWS, is_in_torchtitan=False
)
ARCHITECTURES = _FAMILY.model_types
spec_of = _FAMILY.spec_of
dims_of_hugging_face = _FAMILY.dims_of_hugging_face


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention. Raises ConfigError for
    dimensions of an architecture that is no row here."""
    dims = flavor_dims(FLAVORS, config)
    known = sorted(ARCHITECTURES.values())
    if dims.model_type not in known:
        raise ConfigError(unknown_name("model_type", dims.model_type, known))
    return spec_of(dims, config.flavor)
