"""Names of the parameters of `nn.decoder.Decoder` in Hugging Face's transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.feed_forward import Dense
from torchtitan_lite.nn.norm import RMS_NORM, NormKind
from torchtitan_lite.nn.spec import HuggingFaceForm, HuggingFaceKey, linear_parameters

_NORMS: dict[str, dict[str, str]] = {
    "before": {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "after": {
        "attention_out_norm": "post_attention_layernorm",
        "ffn_out_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_out_norm": "post_feedforward_layernorm",
    },
}
"""By `DecoderLayer.norms`."""
_PREDICTION = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "head_norm": "shared_head.norm",
}
FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FUSED = {"w1": ("gate_up_proj", 0, 2), "w2": ("down_proj", 0, 1), "w3": ("gate_up_proj", 1, 2)}
"""The tensor of stacked experts, and which of how many parts."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceNames:
    """Names of modules in an architecture of transformers, where they are not the usual ones."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.*"
    norm: str = "model.norm"
    output: str = "lm_head"
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Modules or parameters of a layer by their names here, `feed_forward.w1`."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linear layers there that consist of several here, in the order of their rows."""
    in_memory: Mapping[str, str] = field(default_factory=dict)
    """Ends of the names in files, and what modules of transformers 5 have in their place."""
    unused: tuple[str, ...] = ()
    """Patterns (fnmatch) of keys that transformers does not load either."""
    num_unused_layers: int = 0
    """Number of layers after the last one that transformers does not load either."""

    def unused_keys(self, num_layers: int) -> tuple[str, ...]:
        """Return patterns of the keys to ignore in the folder of a model with `num_layers`."""
        behind = range(num_layers, num_layers + self.num_unused_layers)
        layers = (self.layer.replace("*", str(layer)) for layer in behind)
        return (*self.unused, *(f"{layer}.*" for layer in layers))


USUAL_NAMES = HuggingFaceNames()
QKV = {"self_attn.qkv_proj": ("attention.wq", "attention.wk", "attention.wv")}
GATE_UP = {"mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3")}
"""Usual fused layers."""
QK_LAYERNORM = {
    "attention.q_norm": "self_attn.query_layernorm",
    "attention.k_norm": "self_attn.key_layernorm",
}
"""Other names of the norms of queries and keys."""


def decoder_hugging_face_keys(
    layers: Sequence[DecoderLayer],
    *,
    tied_embeddings: bool,
    experts: Sequence[HuggingFaceKey] = (),
    dense: str = "mlp",
    has_predictions: bool = False,
    norm: NormKind = RMS_NORM,
    output_bias: bool = False,
    names: HuggingFaceNames = USUAL_NAMES,
) -> tuple[HuggingFaceKey, ...]:
    """Return the names of a decoder's parameters in transformers. `experts` are those of its
    experts, if it has any; `dense` is the name of a dense block in a layer; `has_predictions`: it
    has layers of multi-token prediction; `norm` is that of hidden states."""
    usual: dict[str, str | HuggingFaceForm] = {}
    for layer in layers:
        for ours, theirs in layer.attention.hugging_face.items():
            usual[f"attention.{ours}"] = theirs
        norms = {name: _NORMS[layer.norms][name] for name in layer.norm_names}
        usual |= _of_modules(norms, norm.parameters)
        if isinstance(layer.feed_forward, Dense):
            projections = {
                f"feed_forward.{name}": f"{dense}.{FEED_FORWARD[name]}"
                for name in (*layer.feed_forward.projections, "w2")
            }
            usual |= _of_modules(projections, linear_parameters(layer.feed_forward.bias))
    if has_predictions:
        usual |= _of_modules(_PREDICTION, ("weight",))
    fused = _fused_forms(layers, names)
    keys = (
        _key("tok_embeddings.weight", f"{names.embedding}.weight"),
        *(_in_layer(ours, theirs, names, fused) for ours, theirs in usual.items()),
        *experts,
        *(_key(f"norm.{kind}", f"{names.norm}.{kind}") for kind in norm.parameters),
        *(
            _key(f"output.{kind}", f"{names.output}.{kind}")
            for kind in linear_parameters(output_bias)
            if kind == "bias" or not tied_embeddings
        ),
    )
    return tuple(_in_memory_too(key, names.in_memory) for key in keys)


def _in_memory_too(key: HuggingFaceKey, in_memory: Mapping[str, str]) -> HuggingFaceKey:
    renamed = tuple(
        replace(form, key=form.key.removesuffix(end) + other)
        for form in key.forms
        for end, other in in_memory.items()
        if form.key.endswith(end)
    )
    return replace(key, forms=(*key.forms, *renamed))


def _of_modules(modules: Mapping[str, str], kinds: Sequence[str]) -> dict[str, str]:
    return {
        f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in kinds
    }


def _fused_forms(
    layers: Sequence[DecoderLayer], names: HuggingFaceNames
) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return the fused layer of each module, and its rows there."""
    sizes: dict[str, int] = {}
    for layer in layers:
        for part in ("attention", "feed_forward"):
            projections: Mapping[str, int] = getattr(getattr(layer, part), "projections", {})
            sizes |= {f"{part}.{name}": size for name, size in projections.items()}
    forms = {}
    for theirs, modules in names.fused.items():
        total, first = sum(sizes.get(module, 0) for module in modules), 0
        for module in modules:
            forms[module] = (theirs, (first, total))
            first += sizes.get(module, 0)
    return forms


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
    has_bias_row: bool = False,
    router: str = "gate",
) -> tuple[HuggingFaceKey, ...]:
    """Return the names of a family's experts: separate tensors, or stacked as transformers 5 has
    them in memory. `block` is the name of the MoE in a layer, `projections` those of w1, w2 and w3,
    `shared` that of the shared experts, `shared_gate` of their gate, and `bias` that of the
    balancing bias, if there are any (`has_bias_row`: it is the row of a matrix there); `router` is
    that of the router's projection."""
    here, layer = "layers.*.feed_forward", "model.layers.*"
    blocks = dict.fromkeys((block, "mlp"))
    biases = () if bias is None else (f"{layer}.{block}.{bias}",)
    keys = [
        _key(f"{here}.router.gate.weight", *(f"{layer}.{name}.{router}.weight" for name in blocks)),
        HuggingFaceKey(
            name=f"{here}.router.expert_bias_X",
            forms=tuple(HuggingFaceForm(key=key, is_row=has_bias_row) for key in biases),
        ),
    ]
    if shared_gate is not None:
        keys.append(_key(f"{here}.shared_gate.weight", f"{layer}.{block}.{shared_gate}.weight"))
    for name, theirs in projections.items():
        stack, part, num_parts = _FUSED[name]
        alone = HuggingFaceForm(key=f"{layer}.{block}.experts.*.{theirs}.weight")
        stacked = (
            HuggingFaceForm(key=f"{layer}.{prefix}.experts.{stack}", part=(part, num_parts))
            for prefix in blocks
        )
        keys.append(HuggingFaceKey(name=f"{here}.experts.{name}", forms=(alone, *stacked)))
        if shared is not None:
            there = f"{layer}.{block}.{shared}.{theirs}.weight"
            keys.append(_key(f"{here}.shared.{name}.weight", there))
    return tuple(keys)


def stacked_expert_keys(
    block: str, stacks: tuple[str, str], *, router: str, shared: str | None, transposed: bool
) -> tuple[HuggingFaceKey, ...]:
    """Return the names of experts that are stacked in files, too: in `stacks` w1 and w3 together,
    and w2. The others are as in `expert_keys`; `transposed`: the matrices of a stack are."""
    here, there = "layers.*.feed_forward", f"model.layers.*.{block}"

    def stack(name: str) -> HuggingFaceKey:
        _, part, num_parts = _FUSED[name]
        key = f"{there}.{stacks[name == 'w2']}"
        form = HuggingFaceForm(key=key, transposed=transposed, part=(part, num_parts))
        return HuggingFaceKey(name=f"{here}.experts.{name}", forms=(form,))

    of_shared = {} if shared is None else FEED_FORWARD
    return (
        _key(f"{here}.router.gate.weight", f"{there}.{router}.weight"),
        _key(f"{here}.router.expert_bias_X"),
        *map(stack, FEED_FORWARD),
        *(
            _key(f"{here}.shared.{name}.weight", f"{there}.{shared}.{theirs}.weight")
            for name, theirs in of_shared.items()
        ),
    )


def _in_layer(
    ours: str,
    theirs: str | HuggingFaceForm,
    names: HuggingFaceNames,
    fused: Mapping[str, tuple[str, tuple[int, int]]],
) -> HuggingFaceKey:
    module, _, kind = ours.rpartition(".")
    form = HuggingFaceForm(key=theirs) if isinstance(theirs, str) else theirs
    if module in fused:
        there, rows = fused[module]
        form = HuggingFaceForm(key=f"{there}.{kind}", rows=rows)
    elif ours in names.renamed:
        form = replace(form, key=names.renamed[ours])
    elif module in names.renamed:
        form = replace(form, key=f"{names.renamed[module]}.{kind}")
    form = replace(form, key=f"{names.layer}.{form.key}")
    return HuggingFaceKey(name=f"layers.*.{ours}", forms=(form,))


def _key(name: str, *theirs: str) -> HuggingFaceKey:
    return HuggingFaceKey(name=name, forms=tuple(HuggingFaceForm(key=key) for key in theirs))
