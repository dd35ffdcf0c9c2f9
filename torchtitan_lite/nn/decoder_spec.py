"""Parts of the spec of any `nn.decoder.Decoder`, from its layers: initial weights, sharding,
stages, cost, and names in torchtitan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from torchtitan_lite.nn.decoder import DecoderLayer
from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.nn.norm import RMS_NORM, NormKind
from torchtitan_lite.nn.spec import InitRule, ModelCost, ShardRule, TorchtitanKey, linear_parameters

_Rule = TypeVar("_Rule", InitRule, ShardRule)


def decoder_init(
    *,
    dim: int,
    layers: Sequence[DecoderLayer],
    tied_embeddings: bool,
    norm: NormKind = RMS_NORM,
    output_bias: bool = False,
) -> tuple[InitRule, ...]:
    """Return rules for truncated normals. Matrices that write into the residual stream shrink with
    depth."""
    output_std = dim**-0.5
    first = "zeros" if norm.zero_centered else "ones"
    # Of linear attention, too.
    norms = [InitRule(pattern="*norm*", kind=first)] if norm.weight else []
    if norm.bias:
        norms.insert(0, InitRule(pattern="*norm.bias", kind="zeros"))
    residual = tuple(
        InitRule(
            pattern=f"layers.{number}.{matrix}",
            kind="normal",
            std=0.02 / (2 * (number + 1)) ** 0.5,
        )
        for number, layer in enumerate(layers)
        for matrix in (
            *(f"attention.{name}" for name in layer.attention.residual_matrices),
            *(f"feed_forward.{name}" for name in layer.feed_forward.residual_matrices),
        )
    )
    return (
        *residual,
        *_of_layers(
            layers,
            lambda layer: (layer.attention.init_rules, layer.feed_forward.init_rules),
        ),
        *norms,
        InitRule(
            pattern="tok_embeddings.weight",
            kind="normal",
            std=output_std if tied_embeddings else 1.0,
        ),
        InitRule(pattern="output.weight", kind="normal", std=output_std),
        *((InitRule(pattern="output.bias", kind="zeros"),) if output_bias else ()),
        InitRule(pattern="layers.*", kind="normal", std=0.02),
    )


def decoder_shard_plan(
    layers: Sequence[DecoderLayer],
    *,
    has_predictions: bool = False,
    norm: NormKind = RMS_NORM,
    output_bias: bool = False,
) -> tuple[ShardRule, ...]:
    """Return the shard plan of a decoder; expert parallelism shards experts. `has_predictions`:
    the last of the layers are of multi-token prediction."""
    prediction = (ShardRule(pattern="layers.*.eh_proj.weight", style="sequence"),)
    return (
        ShardRule(pattern="tok_embeddings.weight", style="embedding"),
        # Before the other norms, which the pattern of those matches too.
        *_of_layers(
            layers,
            lambda layer: (layer.attention.shard_rules, layer.feed_forward.shard_rules),
        ),
        *(prediction if has_predictions else ()),
        *(ShardRule(pattern=f"*norm.{name}", style="sequence") for name in norm.parameters),
        *(
            ShardRule(pattern=f"output.{kind}", style="output")
            for kind in linear_parameters(output_bias)
        ),
    )


def _of_layers(
    layers: Sequence[DecoderLayer],
    rules_of: Callable[[DecoderLayer], tuple[Sequence[_Rule], Sequence[_Rule]]],
) -> tuple[_Rule, ...]:
    """Return the rules of the attention and feed-forward of each layer. A rule of all layers has
    one pattern for all."""
    by_layer = [
        [
            replace(rule, pattern=f"{part}.{rule.pattern}")
            for part, rules in zip(("attention", "feed_forward"), rules_of(layer), strict=True)
            for rule in rules
        ]
        for layer in layers
    ]
    distinct = dict.fromkeys(rule for rules in by_layer for rule in rules)
    return tuple(
        replace(rule, pattern=f"layers.{number}.{rule.pattern}")
        for rule in distinct
        for number in (
            ["*"]
            if all(rule in rules for rules in by_layer)
            else [str(number) for number, rules in enumerate(by_layer) if rule in rules]
        )
    )


def decoder_stage_units(num_layers: int) -> tuple[str, ...]:
    """Return the modules that a pipeline partitions, in the order of forward."""
    layers = (f"layers.{layer}" for layer in range(num_layers))
    return ("tok_embeddings", *layers, "norm", "output")


def decoder_torchtitan_keys(
    layers: Sequence[DecoderLayer], attention: Sequence[TorchtitanKey]
) -> tuple[TorchtitanKey, ...]:
    """Return torchtitan's names of a decoder's parameters. `attention` are those of its attention,
    relative to it."""

    def key(name: str, *theirs: str) -> TorchtitanKey:
        return TorchtitanKey(name=name, theirs=theirs or (name,))

    experts = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, MoEDims)]
    is_dense = len(experts) < len(layers)
    dense = tuple(f"feed_forward.w{number}" for number in (1, 2, 3)) if is_dense else ()
    return (
        key("tok_embeddings.weight"),
        *(
            replace(
                attention_key,
                name=f"layers.*.attention.{attention_key.name}",
                theirs=tuple(f"layers.*.attention.{their}" for their in attention_key.theirs),
            )
            for attention_key in attention
        ),
        *(key(f"layers.*.{name}.weight") for name in ("attention_norm", "ffn_norm", *dense)),
        *(_moe_torchtitan_keys(experts[0]) if experts else ()),
        key("norm.weight"),
        key("output.weight", "output.weight", "lm_head.weight"),
    )


def _moe_torchtitan_keys(moe: MoEDims) -> tuple[TorchtitanKey, ...]:
    here, there = "layers.*.feed_forward", "layers.*.moe"
    return (
        TorchtitanKey(name=f"{here}.router.gate.weight", theirs=(f"{there}.router.gate.weight",)),
        TorchtitanKey(
            name=f"{here}.router.expert_bias_X",
            theirs=(f"{there}.expert_bias", f"{there}.expert_bias_E"),
        ),
        *_experts_torchtitan_keys(moe, f"{here}.experts", there),
        *(
            TorchtitanKey(
                name=f"{here}.shared.{name}.weight",
                theirs=(f"{there}.shared_experts.{name}.weight",),
            )
            for name in ("w1", "w2", "w3")
            if moe.shared_hidden_dim
        ),
    )


def _experts_torchtitan_keys(moe: MoEDims, here: str, there: str) -> Iterator[TorchtitanKey]:
    if moe.swiglu_limit is not None:
        names = {"gate_up": "mlp1_weight", "gate_up_bias": "mlp1_bias"}
        names |= {"down": "mlp2_weight", "down_bias": "mlp2_bias"}
        for ours, theirs in names.items():
            yield TorchtitanKey(name=f"{here}.{ours}", theirs=(f"{there}.experts.{theirs}",))
        bias = "router.gate.bias"
        yield TorchtitanKey(
            name=f"{here.removesuffix('experts')}{bias}", theirs=(f"{there}.{bias}",)
        )
        return
    newer = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}
    for old, new in newer.items():
        yield TorchtitanKey(
            name=f"{here}.{old}",
            theirs=(f"{there}.experts.{old}", f"{there}.routed_experts.inner_experts.{new}"),
        )


def decoder_cost(
    *,
    dim: int,
    layers: Sequence[DecoderLayer],
    num_predictions: int = 0,
    vocab_size: int,
    tied_embeddings: bool,
    seq_len: int,
    norm: NormKind = RMS_NORM,
    output_bias: bool = False,
) -> ModelCost:
    """Return the cost: 6 FLOPs per matrix element and token (forward 2, backward 4), and those of
    attention's scores and values. The last `num_predictions` layers are of multi-token prediction.
    """
    output = vocab_size * dim
    # Norms and what else is no matrix.
    num_norms = 1 + sum(len(layer.norm_names) for layer in layers) + num_predictions * 3
    small = num_norms * dim * len(norm.parameters) + sum(
        layer.attention.num_other_params() + layer.attention.num_biases(dim) for layer in layers
    )
    small += vocab_size * output_bias
    embeddings = output * (1 if tied_embeddings else 2)
    attention = sum(layer.attention.num_matrix_elements(dim) for layer in layers)
    attention += num_predictions * 2 * dim * dim
    feed_forward = sum(layer.feed_forward.num_params(dim) for layer in layers)
    active = attention + sum(layer.feed_forward.num_active_params(dim) for layer in layers)
    return ModelCost(
        num_params=attention + feed_forward + small + embeddings,
        num_active_params=active + small + embeddings,
        flops_per_token=6 * (active + (1 + num_predictions) * output)
        + sum(layer.attention.flops_per_token(seq_len) for layer in layers),
    )
