"""Qwen3 (arXiv:2505.09388), dense and mixture of experts: dimensions, flavors, module and initial
weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.attention import Backend
from torchtitan_lite.nn.decoder import Decoder, DecoderLayer
from torchtitan_lite.nn.decoder_family import build_decoder, decoder_model_spec
from torchtitan_lite.nn.decoder_hugging_face import (
    MoEKeys,
    decoder_hugging_face_keys,
    decoder_values,
    ignored_keys,
    is_known_routing,
    read_decoder,
)
from torchtitan_lite.nn.decoder_spec import decoder_torchtitan_keys
from torchtitan_lite.nn.feed_forward import Dense
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig, differences, rope_values
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import Rope
from torchtitan_lite.nn.spec import HuggingFaceModel, ModelSpec

_DENSE, _MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
ARCHITECTURES = (_DENSE, _MOE)
"""Architectures in transformers that `dims_of_hugging_face` supports."""
_EXPERTS = MoEKeys("mlp", {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})


@dataclass(frozen=True, kw_only=True)
class Qwen3Dims:
    """The dimensions of one flavor. Its blocks have either a feed-forward of width `hidden_dim`
    or the experts of `moe`."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int | None = None
    moe: MoEDims | None = None
    vocab_size: int = 151936
    pad_token_id: int | None = None
    """Token whose embedding gets no gradient as an input."""
    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    max_seq_len: int = 40960
    tied_embeddings: bool = False
    attention_backend: Backend = "sdpa"
    document_mask: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        # Raises ConfigError for sizes that do not fit.
        _ = self.attention
        if (self.hidden_dim is None) == (self.moe is None):
            raise ConfigError(
                f"Give either hidden_dim ({self.hidden_dim}), for dense blocks, or moe "
                f"({self.moe}), for experts."
            )

    @property
    def attention(self) -> GroupedQuery:
        """The attention of every layer."""
        return GroupedQuery(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotation=Rope(head_dim=self.head_dim, theta=self.rope_theta),
            qk_norm_eps=self.norm_eps,
        )

    @property
    def layers(self) -> list[DecoderLayer]:
        """All layers."""
        feed_forward = self.moe
        if feed_forward is None:
            assert self.hidden_dim is not None
            feed_forward = Dense(hidden_dim=self.hidden_dim)
        layer = DecoderLayer(attention=self.attention, feed_forward=feed_forward)
        return [layer] * self.num_layers


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


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)


def spec_of(dims: Qwen3Dims, flavor: str) -> ModelSpec:
    """Return the spec of any dimensions."""
    return decoder_model_spec(
        dims,
        name="qwen3",
        flavor=flavor,
        torchtitan_keys=decoder_torchtitan_keys(
            dims.layers, dims.attention.torchtitan_keys(pairs=False)
        ),
        hugging_face=_hugging_face(dims),
    )


def dims_of_hugging_face(values: Mapping[str, Any]) -> Qwen3Dims:
    """Read the dimensions from a config.json. Raises ConfigError with everything unsupported."""
    config = HuggingFaceConfig(values)
    architecture = config.architecture(ARCHITECTURES)
    sizes = read_decoder(config)
    theta, _ = config.rope(None)
    head_dim = config.integer("head_dim", 128)
    config.only("use_sliding_window", False)
    hidden_dim: int | None = None
    moe: dict[str, Any] | None = None
    if architecture == _MOE:
        # Every block has experts.
        config.only("decoder_sparse_step", 1)
        config.only("mlp_only_layers", [], None)
        moe = {
            # transformers 5 writes the second name.
            "num_experts": config.integer("num_experts", config.given("num_local_experts")),
            "top_k": config.integer("num_experts_per_tok"),
            "hidden_dim": config.integer("moe_intermediate_size"),
            "normalize_weights": config.flag("norm_topk_prob", default=False),
        }
    else:
        hidden_dim = config.integer("intermediate_size")
    config.check()
    return Qwen3Dims(
        **sizes,
        hidden_dim=hidden_dim,
        moe=None if moe is None else MoEDims(**moe),
        head_dim=head_dim,
        rope_theta=theta,
    )


def _hugging_face(dims: Qwen3Dims) -> HuggingFaceModel | None:
    if dims.moe is not None and not is_known_routing(dims.moe):
        return None
    return HuggingFaceModel(
        config={
            "architectures": [_DENSE if dims.moe is None else _MOE],
            "model_type": "qwen3" if dims.moe is None else "qwen3_moe",
            **decoder_values(dims),
            "head_dim": dims.head_dim,
            **rope_values(dims.rope_theta, None),
            "use_sliding_window": False,
            **_feed_forward_values(dims),
        },
        keys=decoder_hugging_face_keys(
            dims.layers,
            tied_embeddings=dims.tied_embeddings,
            moe=None if dims.moe is None else _EXPERTS,
        ),
        ignored=ignored_keys(tied_embeddings=dims.tied_embeddings),
        differences=lambda config: differences(dims, dims_of_hugging_face(config)),
    )


def _feed_forward_values(dims: Qwen3Dims) -> dict[str, Any]:
    if dims.moe is None:
        return {"intermediate_size": dims.hidden_dim}
    return {
        "num_experts": dims.moe.num_experts,
        "num_experts_per_tok": dims.moe.top_k,
        "moe_intermediate_size": dims.moe.hidden_dim,
        "norm_topk_prob": dims.moe.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def build(dims: Qwen3Dims) -> Decoder:
    """Build the module, with parameters as the current default device creates them."""
    return build_decoder(dims)
