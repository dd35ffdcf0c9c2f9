"""Names of sizes and parameters of `nn.decoder.Decoder` in Hugging Face's transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.hugging_face_config import HuggingFaceConfig
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey

_SIZES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_NORMS = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_PREDICTION = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "head_norm.weight": "shared_head.norm.weight",
}
_FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = {"w1": ("gate_up_proj", 0, 2), "w2": ("down_proj", 0, 1), "w3": ("gate_up_proj", 1, 2)}
"""The tensor of stacked experts, and which of how many parts."""


def read_decoder(
    config: HuggingFaceConfig,
    *,
    attention_bias: bool = False,
    norm_eps: float = 1e-6,
    num_kv_heads: int | None = None,
) -> dict[str, Any]:
    """Read the sizes that all decoders have, by our names; check activation and biases. `norm_eps`
    and `num_kv_heads` (by default as many as query heads) are those of a config without them."""
    sizes: dict[str, Any] = {ours: config.integer(theirs) for ours, theirs in _SIZES.items()}
    config.only("hidden_act", "silu")
    config.only("attention_bias", attention_bias)
    config.only("mlp_bias", False)
    return sizes | {
        "num_kv_heads": config.integer("num_key_value_heads", num_kv_heads or sizes["num_heads"]),
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "max_seq_len": config.integer("max_position_embeddings"),
        "tied_embeddings": config.flag("tie_word_embeddings", default=False),
        "pad_token_id": _pad_token_id(config, sizes["vocab_size"]),
    }


def _pad_token_id(config: HuggingFaceConfig, vocab_size: int) -> int | None:
    """Read the token whose embedding transformers does not train as an input. A negative one counts
    from the end, as in `nn.Embedding`; one without an embedding is no input."""
    given = config.given("pad_token_id")
    is_input = type(given) is int and -vocab_size <= given < vocab_size
    return given % vocab_size if is_input else None


def decoder_values(dims: Any, *, attention_bias: bool = False) -> dict[str, Any]:
    """Return these sizes as a config.json of `dims`."""
    return {theirs: getattr(dims, ours) for ours, theirs in _SIZES.items()} | {
        "num_key_value_heads": dims.num_kv_heads,
        "rms_norm_eps": dims.norm_eps,
        "max_position_embeddings": dims.max_seq_len,
        "tie_word_embeddings": dims.tied_embeddings,
        **({} if dims.pad_token_id is None else {"pad_token_id": dims.pad_token_id}),
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "attention_dropout": 0.0,
    }


def decoder_hugging_face_keys(
    layers: Sequence[DecoderLayer],
    *,
    tied_embeddings: bool,
    moe: "MoEKeys | None" = None,
    dense: str = "mlp",
    has_predictions: bool = False,
) -> tuple[HuggingFaceKey, ...]:
    """Return the names of a decoder's parameters in transformers. `moe` are those of its experts,
    if it has any; `dense` is the name of a dense block in a layer; `has_predictions`: it has layers
    of multi-token prediction."""
    layer = "model.layers.*"
    attention = {
        f"attention.{ours}": their
        for one in layers
        for ours, their in one.attention.hugging_face.items()
    }
    is_dense = any(not isinstance(one.feed_forward, MoEDims) for one in layers)
    return (
        _key("tok_embeddings.weight", "model.embed_tokens.weight"),
        *(
            _in_layer(ours, their)
            for ours, their in (
                attention | _NORMS | (_PREDICTION if has_predictions else {})
            ).items()
        ),
        *(_dense(f"{layer}.{dense}") if is_dense else ()),
        *(() if moe is None else moe.keys(layer)),
        _key("norm.weight", "model.norm.weight"),
        *(() if tied_embeddings else (_key("output.weight", "lm_head.weight"),)),
    )


def ignored_keys(*, tied_embeddings: bool) -> tuple[str, ...]:
    """Return keys to ignore: older releases wrote RoPE frequencies too, and some write a tied
    weight twice."""
    return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if tied_embeddings else ()))


def is_known_routing(moe: MoEDims) -> bool:
    """Whether transformers routes like `moe`: softmax over all experts, no shared experts, weights
    not rescaled, of the outputs of plain experts."""
    given = (moe.score, moe.shared_hidden_dim, moe.route_scale, moe.num_groups)
    return given == ("softmax", 0, 1.0, 1) and has_plain_experts(moe)


def has_plain_experts(moe: MoEDims) -> bool:
    """Whether the experts are SwiGLUs without biases, whose outputs are weighted, and shared ones
    have no gate."""
    return moe.swiglu_limit is None and not moe.weights_inputs and not moe.shared_gate


class MoEKeys:
    """Names of a family's experts."""

    def __init__(
        self,
        block: str,
        projections: dict[str, str],
        *,
        shared: str | None = None,
        shared_gate: str | None = None,
        bias: tuple[str, ...] = (),
    ) -> None:
        """`block` is the name of the MoE in a layer, `projections` those of w1, w2 and w3, `shared`
        that of the shared experts, `shared_gate` of their gate, and `bias` that of the balancing
        bias, if there are any."""
        self._block, self._projections = block, projections
        self._shared, self._shared_gate, self._bias = shared, shared_gate, bias

    def keys(self, layer: str) -> Iterator[HuggingFaceKey]:
        """Return the forms of experts: separate tensors, or stacked as transformers 5 has them in
        memory."""
        here = "layers.*.feed_forward"
        blocks = dict.fromkeys((self._block, "mlp"))
        gates = (f"{layer}.{block}.gate.weight" for block in blocks)
        yield _key(f"{here}.router.gate.weight", *gates)
        yield _key(
            f"{here}.router.expert_bias_X", *(f"{layer}.{self._block}.{key}" for key in self._bias)
        )
        if self._shared_gate is not None:
            there = f"{layer}.{self._block}.{self._shared_gate}.weight"
            yield _key(f"{here}.shared_gate.weight", there)
        for name, theirs in self._projections.items():
            stack, number, count = _FUSED[name]
            alone = HuggingFaceForm(key=f"{layer}.{self._block}.experts.*.{theirs}.weight")
            stacked = (
                HuggingFaceForm(key=f"{layer}.{block}.experts.{stack}", part=(number, count))
                for block in blocks
            )
            yield HuggingFaceKey(name=f"{here}.experts.{name}", forms=(alone, *stacked))
            if self._shared is not None:
                there = f"{layer}.{self._block}.{self._shared}.{theirs}.weight"
                yield _key(f"{here}.shared.{name}.weight", there)


def _dense(block: str) -> Iterator[HuggingFaceKey]:
    for ours, theirs in _FEED_FORWARD.items():
        yield _key(f"layers.*.feed_forward.{ours}.weight", f"{block}.{theirs}.weight")


def _in_layer(ours: str, their: str | HuggingFaceForm) -> HuggingFaceKey:
    form = HuggingFaceForm(key=their) if isinstance(their, str) else their
    form = replace(form, key=f"model.layers.*.{form.key}")
    return HuggingFaceKey(name=f"layers.*.{ours}", forms=(form,))


def _key(name: str, *theirs: str) -> HuggingFaceKey:
    return HuggingFaceKey(name=name, forms=tuple(HuggingFaceForm(key=key) for key in theirs))
