"""Names of sizes and parameters of `nn.decoder.Decoder` in Hugging Face's transformers. Layer:
above spec; `nn.hugging_face_config`, `nn.moe`."""

from collections.abc import Iterator
from typing import Any

from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.spec import HuggingFaceForm, HuggingFaceKey

_SIZES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_ATTENTION = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_QK_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
_FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = {"w1": ("gate_up_proj", 0, 2), "w2": ("down_proj", 0, 1), "w3": ("gate_up_proj", 1, 2)}
"""The tensor of stacked experts, and which of how many parts."""


def read_decoder(config: HuggingFaceConfig) -> dict[str, Any]:
    """Read the sizes that all decoders have, by our names; check activation and biases."""
    sizes: dict[str, Any] = {ours: config.integer(theirs) for ours, theirs in _SIZES.items()}
    config.only("hidden_act", "silu")
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    return sizes | {
        "num_kv_heads": config.integer("num_key_value_heads", sizes["num_heads"]),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "max_seq_len": config.integer("max_position_embeddings"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
    }


def decoder_values(dims: Any) -> dict[str, Any]:
    """Return these sizes as a config.json of `dims`."""
    return {theirs: getattr(dims, ours) for ours, theirs in _SIZES.items()} | {
        "num_key_value_heads": dims.num_kv_heads,
        "rms_norm_eps": dims.norm_eps,
        "max_position_embeddings": dims.max_seq_len,
        "tie_word_embeddings": dims.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def decoder_hugging_face_keys(
    *, qk_norm: bool = False, tied_embeddings: bool, moe: "MoEKeys | None" = None
) -> tuple[HuggingFaceKey, ...]:
    """Return the names of a decoder's parameters in transformers."""
    block = _ATTENTION | (_QK_NORMS if qk_norm else {})
    layer = "model.layers.*"
    return (
        _key("tok_embeddings.weight", "model.embed_tokens.weight"),
        *(
            _key(f"layers.*.{ours}.weight", f"{layer}.{their}.weight")
            for ours, their in block.items()
        ),
        *(_dense(layer) if moe is None else moe.keys(layer)),
        _key("norm.weight", "model.norm.weight"),
        *(() if tied_embeddings else (_key("output.weight", "lm_head.weight"),)),
    )


def ignored_keys(*, tied_embeddings: bool) -> tuple[str, ...]:
    """Return keys to ignore: older releases wrote RoPE frequencies too, and some write a tied
    weight twice."""
    return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if tied_embeddings else ()))


def is_known_routing(moe: MoEDims) -> bool:
    """Whether transformers routes like `dims`: softmax, no shared experts, weights not rescaled."""
    return (moe.score, moe.shared_hidden_dim, moe.route_scale) == ("softmax", 0, 1.0)


class MoEKeys:
    """Names of a family's experts."""

    def __init__(self, block: str, projections: dict[str, str]) -> None:
        """`block` is the name of the MoE in a layer, `projections` those of w1, w2 and w3."""
        self._block, self._projections = block, projections

    def keys(self, layer: str) -> Iterator[HuggingFaceKey]:
        """Return the forms of experts: separate tensors, or stacked as transformers 5 has them in
        memory."""
        here = "layers.*.feed_forward"
        blocks = dict.fromkeys((self._block, "mlp"))
        gates = (f"{layer}.{block}.gate.weight" for block in blocks)
        yield _key(f"{here}.router.gate.weight", *gates)
        yield HuggingFaceKey(name=f"{here}.router.expert_bias_X", forms=())
        for name, theirs in self._projections.items():
            stack, number, count = _FUSED[name]
            alone = HuggingFaceForm(key=f"{layer}.{self._block}.experts.*.{theirs}.weight")
            stacked = (
                HuggingFaceForm(key=f"{layer}.{block}.experts.{stack}", part=(number, count))
                for block in blocks
            )
            yield HuggingFaceKey(name=f"{here}.experts.{name}", forms=(alone, *stacked))


def _dense(layer: str) -> Iterator[HuggingFaceKey]:
    for ours, theirs in _FEED_FORWARD.items():
        yield _key(f"layers.*.feed_forward.{ours}.weight", f"{layer}.mlp.{theirs}.weight")


def _key(name: str, *theirs: str) -> HuggingFaceKey:
    return HuggingFaceKey(name=name, forms=tuple(HuggingFaceForm(key=key) for key in theirs))
