"""Small models of architectures of transformers, of the size of Llama's tiny flavor; a module for
`experimental.custom_import`."""

from typing import Any

from torchtitan_lite.models import auto
from torchtitan_lite.models.auto.dims import AutoDims
from torchtitan_lite.nn.norm import NormKind

_SIZES: dict[str, Any] = {
    "dim": 128,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 384,
    "vocab_size": 2048,
    "document_mask": True,
}
ARCHITECTURES = ("gemma2", "granite", "olmo2")
auto.FLAVORS |= {
    "gemma2": AutoDims(
        **_SIZES,
        model_type="gemma2",
        activation="gelu_tanh",
        norm=NormKind(zero_centered=True),
        norms="both",
        embedding_multiplier=128**0.5,
        attention_soft_cap=50.0,
        logits_soft_cap=30.0,
        window=32,
        windowed_layers=(0, 2),
    ),
    "granite": AutoDims(
        **_SIZES,
        model_type="granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=1 / 32,
        logits_divisor=8.0,
    ),
    "olmo2": AutoDims(**_SIZES, model_type="olmo2", norms="after", qk_norm="all_heads"),
}
