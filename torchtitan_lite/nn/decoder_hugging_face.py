"""Names of the parameters of `nn.decoder.Decoder` in Hugging Face's transformers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey

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


def decoder_hugging_face_keys(
    layers: Sequence[DecoderLayer],
    *,
    tied_embeddings: bool,
    experts: Sequence[HuggingFaceKey] = (),
    dense: str = "mlp",
    has_predictions: bool = False,
) -> tuple[HuggingFaceKey, ...]:
    """Return the names of a decoder's parameters in transformers. `experts` are those of its
    experts, if it has any; `dense` is the name of a dense block in a layer; `has_predictions`: it
    has layers of multi-token prediction."""
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
        *experts,
        _key("norm.weight", "model.norm.weight"),
        *(() if tied_embeddings else (_key("output.weight", "lm_head.weight"),)),
    )


def ignored_keys(*, tied_embeddings: bool) -> tuple[str, ...]:
    """Return keys to ignore: older releases wrote RoPE frequencies too, and some write a tied
    weight twice."""
    return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if tied_embeddings else ()))


def expert_keys(
    block: str,
    projections: Mapping[str, str],
    *,
    shared: str | None = None,
    shared_gate: str | None = None,
    bias: str | None = None,
) -> tuple[HuggingFaceKey, ...]:
    """Return the names of a family's experts: separate tensors, or stacked as transformers 5 has
    them in memory. `block` is the name of the MoE in a layer, `projections` those of w1, w2 and w3,
    `shared` that of the shared experts, `shared_gate` of their gate, and `bias` that of the
    balancing bias, if there are any."""
    here, layer = "layers.*.feed_forward", "model.layers.*"
    blocks = dict.fromkeys((block, "mlp"))
    keys = [
        _key(f"{here}.router.gate.weight", *(f"{layer}.{name}.gate.weight" for name in blocks)),
        _key(
            f"{here}.router.expert_bias_X", *([] if bias is None else [f"{layer}.{block}.{bias}"])
        ),
    ]
    if shared_gate is not None:
        keys.append(_key(f"{here}.shared_gate.weight", f"{layer}.{block}.{shared_gate}.weight"))
    for name, theirs in projections.items():
        stack, part, num_parts = _FUSED[name]
        alone = HuggingFaceForm(key=f"{layer}.{block}.experts.*.{theirs}.weight")
        stacked = (
            HuggingFaceForm(key=f"{layer}.{one}.experts.{stack}", part=(part, num_parts))
            for one in blocks
        )
        keys.append(HuggingFaceKey(name=f"{here}.experts.{name}", forms=(alone, *stacked)))
        if shared is not None:
            there = f"{layer}.{block}.{shared}.{theirs}.weight"
            keys.append(_key(f"{here}.shared.{name}.weight", there))
    return tuple(keys)


def _dense(block: str) -> Iterator[HuggingFaceKey]:
    for ours, theirs in _FEED_FORWARD.items():
        yield _key(f"layers.*.feed_forward.{ours}.weight", f"{block}.{theirs}.weight")


def _in_layer(ours: str, their: str | HuggingFaceForm) -> HuggingFaceKey:
    form = HuggingFaceForm(key=their) if isinstance(their, str) else their
    form = replace(form, key=f"model.layers.*.{form.key}")
    return HuggingFaceKey(name=f"layers.*.{ours}", forms=(form,))


def _key(name: str, *theirs: str) -> HuggingFaceKey:
    return HuggingFaceKey(name=name, forms=tuple(HuggingFaceForm(key=key) for key in theirs))
