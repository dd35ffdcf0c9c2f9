"""Mixtral (arXiv:2401.04088): dimensions, flavors and its config.json in transformers."""

from dataclasses import dataclass

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.grouped_decoder import GroupedDecoderDims, GroupedDecoderFamily
from torchtitan_lite.nn.hugging_face.facts import (
    Architecture,
    Value,
    decoder_facts,
    width_per_head,
)
from torchtitan_lite.nn.hugging_face.names import expert_keys
from torchtitan_lite.nn.hugging_face.position_facts import Rotation, Window
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MixtralDims(GroupedDecoderDims):
    """The dimensions of one flavor."""

    head_dim: int = 128
    rope_theta: float = 1000000.0


FLAVORS = {
    "debugmodel": MixtralDims(
        dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        moe=MoEDims(num_experts=4, top_k=2, hidden_dim=192),
        vocab_size=2048,
        head_dim=32,
        document_mask=True,
    ),
    "8x7B": MixtralDims(
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        moe=MoEDims(num_experts=8, top_k=2, hidden_dim=14336),
    ),
    "8x22B": MixtralDims(
        dim=6144,
        num_layers=56,
        num_heads=48,
        num_kv_heads=8,
        moe=MoEDims(num_experts=8, top_k=2, hidden_dim=16384),
        vocab_size=32768,
        max_seq_len=65536,
    ),
}


_FAMILY = GroupedDecoderFamily(
    name="mixtral",
    dims=MixtralDims,
    is_in_torchtitan=False,
    architectures=(
        Architecture(
            name="MixtralForCausalLM",
            model_type="mixtral",
            facts=(
                *decoder_facts(norm_eps=1e-5, num_kv_heads=8),
                Value("head_dim", "head_dim", default=width_per_head),
                Value("moe.hidden_dim", "intermediate_size"),
                Value("moe.num_experts", "num_local_experts", default=8),
                Value("moe.top_k", "num_experts_per_tok", default=2),
                Window(None),
                Rotation(1000000.0),
            ),
            experts=expert_keys("block_sparse_moe", {"w1": "w1", "w2": "w2", "w3": "w3"}),
        ),
    ),
)
ARCHITECTURES = _FAMILY.model_types
spec_of = _FAMILY.spec_of
dims_of_hugging_face = _FAMILY.dims_of_hugging_face


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)
