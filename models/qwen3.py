"""Qwen3 (arXiv:2505.09388), dense and with experts: dimensions, flavors and its config.json in
transformers."""

from dataclasses import dataclass, replace

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.grouped_decoder import GroupedDecoderDims, GroupedDecoderFamily
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face.facts import (
    Architecture,
    Biases,
    Fixed,
    Ignored,
    Value,
    decoder_facts,
    width_per_head,
)
from torchtitan_lite.nn.hugging_face.names import FEED_FORWARD, expert_keys
from torchtitan_lite.nn.hugging_face.position_facts import LayerWindows, Rotation, from_layer
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3Dims(GroupedDecoderDims):
    """The dimensions of one flavor."""

    vocab_size: int = 151936
    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    max_seq_len: int = 40960

    def attention(self, layer: int) -> GroupedQuery:
        """Return the attention of a layer, with normalized queries and keys."""
        return replace(super().attention(layer), qk_norm_eps=self.norm_eps)


_TINY = Qwen3Dims(
    dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=384,
    vocab_size=2048,
    head_dim=32,
    document_mask=True,
)
_DEBUG = Qwen3Dims(
    dim=256,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    hidden_dim=3072,
    vocab_size=2048,
    tied_embeddings=True,
)

FLAVORS = {
    "tiny": _TINY,
    # A token passes through as many parameters as in tiny, of 3.1 M.
    "tiny_moe": replace(
        _TINY, hidden_dim=None, moe=MoEDims(num_experts=8, top_k=2, hidden_dim=192)
    ),
    "debugmodel": _DEBUG,
    "debugmodel_moe": replace(
        _DEBUG,
        hidden_dim=None,
        tied_embeddings=False,
        moe=MoEDims(num_experts=64, top_k=8, hidden_dim=768),
    ),
    "0.6B": Qwen3Dims(
        dim=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        hidden_dim=3072,
        tied_embeddings=True,
    ),
    "1.7B": Qwen3Dims(
        dim=2048,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        hidden_dim=6144,
        tied_embeddings=True,
    ),
    "4B": Qwen3Dims(
        dim=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=9728,
        tied_embeddings=True,
    ),
    "8B": Qwen3Dims(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, hidden_dim=12288),
    "14B": Qwen3Dims(dim=5120, num_layers=40, num_heads=40, num_kv_heads=8, hidden_dim=17408),
    "32B": Qwen3Dims(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, hidden_dim=25600),
    "30B-A3B": Qwen3Dims(
        dim=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        moe=MoEDims(num_experts=128, top_k=8, hidden_dim=768),
    ),
    "235B-A22B": Qwen3Dims(
        dim=4096,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        moe=MoEDims(num_experts=128, top_k=8, hidden_dim=1536),
        # As in the release of July 2025, and in torchtitan; the first release had 1,000,000.
        rope_theta=5000000.0,
    ),
}


_FAMILY = GroupedDecoderFamily(
    name="qwen3",
    dims=Qwen3Dims,
    architectures=(
        Architecture(
            name="Qwen3ForCausalLM",
            model_type="qwen3",
            facts=(
                *decoder_facts(attention_bias=None, num_kv_heads=32),
                Biases(),
                Rotation(),
                Value("head_dim", "head_dim", default=128),
                LayerWindows(4096, from_layer(28)),
                Value("hidden_dim", "intermediate_size"),
            ),
        ),
        Architecture(
            name="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            facts=(
                *decoder_facts(attention_bias=None, num_kv_heads=4),
                Biases(),
                Rotation(),
                Value("head_dim", "head_dim", default=width_per_head),
                # transformers 5 writes the second name.
                Value("moe.num_experts", "num_experts", default=128, former="num_local_experts"),
                Value("moe.top_k", "num_experts_per_tok", default=8),
                Value("moe.hidden_dim", "moe_intermediate_size", default=768),
                Value("moe.normalize_weights", "norm_topk_prob", "flag", default=False),
                Fixed("use_sliding_window", False),
                Ignored("sliding_window", "max_window_layers"),
                # Every block has experts.
                Ignored("intermediate_size"),
                Fixed("decoder_sparse_step", 1),
                Fixed("mlp_only_layers", [], None),
            ),
            experts=expert_keys("mlp", FEED_FORWARD),
        ),
    ),
)
ARCHITECTURES = _FAMILY.model_types
spec_of = _FAMILY.spec_of
dims_of_hugging_face = _FAMILY.dims_of_hugging_face


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)
