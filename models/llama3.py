"""Llama 3 (arXiv:2407.21783): dimensions, flavors and its config.json in transformers."""

from dataclasses import dataclass, replace

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.grouped_decoder import GroupedDecoderDims, GroupedDecoderFamily
from torchtitan_lite.nn.hugging_face.facts import (
    Architecture,
    Biases,
    Fixed,
    HeadWidth,
    Value,
    decoder_facts,
)
from torchtitan_lite.nn.hugging_face.position_facts import Rotation
from torchtitan_lite.nn.rope import RopeScaling
from torchtitan_lite.nn.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Llama3Dims(GroupedDecoderDims):
    """The dimensions of one flavor."""

    vocab_size: int = 128256
    rope_theta: float = 500000.0
    max_seq_len: int = 131072


# The released sizes stretch their rotations from a context of 8,192 (Llama 3.1 and 3.2).
_SCALED = RopeScaling(factor=8.0)
_DEBUG = Llama3Dims(
    dim=256,
    num_layers=6,
    num_heads=16,
    num_kv_heads=16,
    hidden_dim=768,
    vocab_size=2048,
    rope_scaling=_SCALED,
)
_8B = Llama3Dims(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14336,
    rope_scaling=_SCALED,
)

FLAVORS = {
    # 1.3 M parameters: reaches a loss below 4 within two minutes on two CPU cores.
    "tiny": Llama3Dims(
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=384,
        vocab_size=2048,
        document_mask=True,
    ),
    "debugmodel": _DEBUG,
    "debugmodel_flex_attn": replace(_DEBUG, attention_backend="flex", document_mask=True),
    # torchtitan's varlen attention sees only the tokens of the same document.
    "debugmodel_varlen_attn": replace(_DEBUG, document_mask=True),
    "1B": Llama3Dims(
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tied_embeddings=True,
    ),
    "3B": Llama3Dims(
        dim=3072,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        hidden_dim=8192,
        rope_scaling=RopeScaling(factor=32.0),
        tied_embeddings=True,
    ),
    "8B": _8B,
    "8B_flex": replace(_8B, attention_backend="flex", document_mask=True),
    "8B_varlen": replace(_8B, document_mask=True),
    "70B": Llama3Dims(
        dim=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        hidden_dim=28672,
        rope_scaling=_SCALED,
    ),
    "405B": Llama3Dims(
        dim=16384,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        hidden_dim=53248,
        rope_scaling=_SCALED,
    ),
}


_FAMILY = GroupedDecoderFamily(
    name="llama3",
    dims=Llama3Dims,
    torchtitan_rotates_pairs=True,
    architectures=(
        Architecture(
            name="LlamaForCausalLM",
            model_type="llama",
            facts=(
                *decoder_facts(attention_bias=None, mlp_bias=None),
                Biases(),
                Biases("mlp_bias", ours=("feed_forward_bias",)),
                HeadWidth(),
                Value("hidden_dim", "intermediate_size"),
                Fixed("rope_interleaved", False, is_written=False),
                Rotation(),
            ),
        ),
    ),
)
ARCHITECTURES = _FAMILY.model_types
spec_of = _FAMILY.spec_of
dims_of_hugging_face = _FAMILY.dims_of_hugging_face


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)
