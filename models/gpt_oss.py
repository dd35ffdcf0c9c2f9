"""gpt-oss (arXiv:2508.10925): dimensions, flavors and its config.json in transformers."""

from dataclasses import dataclass, replace

from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.models import flavor_dims
from torchtitan_lite.nn.grouped_decoder import GroupedDecoderDims, GroupedDecoderFamily
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.hugging_face.facts import Architecture, Fixed, Ignored, Value, decoder_facts
from torchtitan_lite.nn.hugging_face.position_facts import LayerTypes, Rotation
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.rope import YarnScaling
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey, ModelSpec

_ROPE = YarnScaling(factor=32.0, original_max_position=4096, truncate=False)


@dataclass(frozen=True, kw_only=True)
class GptOssDims(GroupedDecoderDims):
    """The dimensions of one flavor."""

    dim: int = 2880
    num_layers: int = 24
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 64
    window: int = 128
    """Positions that every second layer, from the first on, attends to."""
    vocab_size: int = 201088
    rope_theta: float = 150000.0
    max_seq_len: int = 131072

    @property
    def is_in_torchtitan(self) -> bool:
        return True

    def attention(self, layer: int) -> GroupedQuery:
        """Return the attention of a layer, with biases and sinks."""
        return replace(
            super().attention(layer),
            bias=True,
            out_bias=True,
            window=self.window if layer % 2 == 0 else None,
            has_sinks=True,
        )


def _moe(num_experts: int, hidden_dim: int = 2880) -> MoEDims:
    # Softmax of all experts, normalized over the chosen ones, is the softmax of the chosen ones.
    return MoEDims(
        num_experts=num_experts,
        top_k=4,
        hidden_dim=hidden_dim,
        swiglu_limit=7.0,
        bias_update_rate=0.001,
    )


FLAVORS = {
    # 1 M parameters with everything that the large ones have.
    "tiny": GptOssDims(
        dim=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        moe=MoEDims(
            num_experts=8, top_k=2, hidden_dim=64, swiglu_limit=7.0, bias_update_rate=0.001
        ),
        window=32,
        vocab_size=2048,
        rope_scaling=_ROPE,
        document_mask=True,
    ),
    "debugmodel": GptOssDims(dim=256, num_layers=4, moe=_moe(8), rope_scaling=_ROPE),
    "20b": GptOssDims(moe=_moe(32), rope_scaling=_ROPE),
    "120b": GptOssDims(num_layers=36, moe=_moe(128), rope_scaling=_ROPE),
}


def _expert_keys() -> tuple[HuggingFaceKey, ...]:
    here, there = "layers.*.feed_forward", "model.layers.*.mlp"

    def key(name: str, *forms: HuggingFaceForm) -> HuggingFaceKey:
        return HuggingFaceKey(name=f"{here}.{name}", forms=forms)

    def stack(name: str, theirs: str) -> HuggingFaceKey:
        # Releases are in MXFP4; transformers saves transposed matrices.
        stored = f"{there}.experts.{theirs}"
        return key(
            f"experts.{name}",
            HuggingFaceForm(key=stored, transposed=True),
            HuggingFaceForm(key=f"{stored}_blocks", scales=f"{stored}_scales"),
        )

    def plain(name: str, theirs: str) -> HuggingFaceKey:
        return key(name, HuggingFaceForm(key=f"{there}.{theirs}"))

    return (
        plain("router.gate.weight", "router.weight"),
        plain("router.gate.bias", "router.bias"),
        key("router.expert_bias_X"),
        stack("gate_up", "gate_up_proj"),
        plain("experts.gate_up_bias", "experts.gate_up_proj_bias"),
        stack("down", "down_proj"),
        plain("experts.down_bias", "experts.down_proj_bias"),
    )


_FAMILY = GroupedDecoderFamily(
    name="gpt_oss",
    dims=GptOssDims,
    architectures=(
        Architecture(
            name="GptOssForCausalLM",
            model_type="gpt_oss",
            facts=(
                *decoder_facts(attention_bias=True, norm_eps=1e-5, num_kv_heads=8),
                Value("head_dim", "head_dim", default=64),
                Value("window", "sliding_window", default=128),
                LayerTypes(("sliding_attention", "full_attention")),
                Value("moe.num_experts", "num_local_experts", default=128),
                Value("moe.top_k", "num_experts_per_tok", default=4),
                Value("moe.hidden_dim", "intermediate_size"),
                Value("moe.swiglu_limit", "swiglu_limit", "number", 7.0),
                # Of the experts' gate; see `nn.moe.ClampedExperts`.
                Fixed("swiglu_alpha", 1.702),
                Ignored("experts_per_token", "initial_context_length"),
                Rotation(150000.0, default_scaling=_ROPE),
            ),
            experts=_expert_keys(),
            quantization="mxfp4",
        ),
    ),
)
ARCHITECTURES = _FAMILY.model_types
spec_of = _FAMILY.spec_of
dims_of_hugging_face = _FAMILY.dims_of_hugging_face


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor` with the configured attention."""
    return spec_of(flavor_dims(FLAVORS, config), config.flavor)
