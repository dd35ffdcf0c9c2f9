"""Parts of the spec of any `nn.decoder.Decoder`: initial weights, sharding, stages and cost. Layer:
above spec; `nn.moe`."""

from collections.abc import Sequence

from torchtitan_lite.nn.moe import MoEDims
from torchtitan_lite.spec import InitRule, ModelCost, ShardRule, TorchtitanKey


def decoder_init(
    *, dim: int, num_layers: int, residual_matrices: Sequence[str], tied_embeddings: bool
) -> tuple[InitRule, ...]:
    """Return rules for truncated normals. `residual_matrices` are the parameters of a block that
    write into the residual stream; they shrink with depth."""
    output_std = dim**-0.5
    residual = tuple(
        InitRule(
            pattern=f"layers.{layer}.{matrix}",
            kind="normal",
            std=0.02 / (2 * (layer + 1)) ** 0.5,
        )
        for layer in range(num_layers)
        for matrix in residual_matrices
    )
    return (
        *residual,
        InitRule(pattern="*norm*", kind="ones"),
        InitRule(
            pattern="tok_embeddings.weight",
            kind="normal",
            std=output_std if tied_embeddings else 1.0,
        ),
        InitRule(pattern="output.weight", kind="normal", std=output_std),
        InitRule(pattern="layers.*", kind="normal", std=0.02),
    )


def decoder_shard_plan(
    *, qk_norm: bool = False, moe: MoEDims | None = None
) -> tuple[ShardRule, ...]:
    """Return the shard plan of a decoder whose blocks have an `nn.feed_forward.FeedForward` or an
    `nn.moe.MoE`, whose experts it does not shard."""
    # Before the other norms, which its pattern matches too.
    heads = (ShardRule(pattern="layers.*.attention.[qk]_norm.weight", style="heads"),)
    # The router works on the tokens that its rank has, and the choice is the same anywhere.
    router = (ShardRule(pattern="layers.*.feed_forward.router.gate.weight", style="sequence"),)
    return (
        ShardRule(pattern="tok_embeddings.weight", style="embedding"),
        ShardRule(pattern="layers.*.attention.w[qkv].weight", style="columns"),
        ShardRule(pattern="layers.*.attention.wo.weight", style="rows"),
        *(router if moe is not None else ()),
        *_feed_forward_rules(moe),
        *(heads if qk_norm else ()),
        ShardRule(pattern="*norm.weight", style="sequence"),
        ShardRule(pattern="output.weight", style="output"),
    )


def _feed_forward_rules(moe: MoEDims | None) -> tuple[ShardRule, ...]:
    """Return the rules of the shared experts or the dense block."""
    if moe is not None and not moe.shared_hidden_dim:
        return ()
    place = "layers.*.feed_forward" if moe is None else "layers.*.feed_forward.shared"
    return (
        ShardRule(pattern=f"{place}.w[13].weight", style="columns"),
        ShardRule(pattern=f"{place}.w2.weight", style="rows"),
    )


def decoder_stage_units(num_layers: int) -> tuple[str, ...]:
    """Return the modules that a pipeline partitions, in the order of forward."""
    layers = (f"layers.{layer}" for layer in range(num_layers))
    return ("tok_embeddings", *layers, "norm", "output")


def decoder_torchtitan_keys(
    *, rope_heads: tuple[int, int] = (0, 0), qk_norm: bool = False, moe: bool = False
) -> tuple[TorchtitanKey, ...]:
    """Return torchtitan's names of a decoder's parameters. `rope_heads` are the query and key heads
    if torchtitan rotates adjacent numbers."""

    def key(name: str, *theirs: str, rope_heads: int = 0) -> TorchtitanKey:
        return TorchtitanKey(name=name, theirs=theirs or (name,), rope_heads=rope_heads)

    def qkv(letter: str, heads: int) -> TorchtitanKey:
        name = f"layers.*.attention.w{letter}.weight"
        newer = f"layers.*.attention.qkv_linear.w{letter}.weight"
        return key(name, name, newer, rope_heads=heads)

    query_heads, key_heads = rope_heads
    norms = ("attention.q_norm", "attention.k_norm") if qk_norm else ()
    block = ("attention.wo", "attention_norm", "ffn_norm", *norms)
    dense = tuple(f"feed_forward.w{number}" for number in (1, 2, 3)) if not moe else ()
    return (
        key("tok_embeddings.weight"),
        *(qkv(letter, n) for letter, n in (("q", query_heads), ("k", key_heads), ("v", 0))),
        *(key(f"layers.*.{name}.weight") for name in (*block, *dense)),
        *(_moe_torchtitan_keys() if moe else ()),
        key("norm.weight"),
        key("output.weight", "output.weight", "lm_head.weight"),
    )


def _moe_torchtitan_keys() -> tuple[TorchtitanKey, ...]:
    here, there = "layers.*.feed_forward", "layers.*.moe"
    newer = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}
    return (
        TorchtitanKey(name=f"{here}.router.gate.weight", theirs=(f"{there}.router.gate.weight",)),
        TorchtitanKey(
            name=f"{here}.router.expert_bias_X",
            theirs=(f"{there}.expert_bias", f"{there}.expert_bias_E"),
        ),
        *(
            TorchtitanKey(
                name=f"{here}.experts.{old}",
                theirs=(
                    f"{there}.experts.{old}",
                    f"{there}.routed_experts.inner_experts.{new}",
                ),
            )
            for old, new in newer.items()
        ),
    )


def decoder_cost(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qk_norm: bool,
    feed_forward_params: int,
    active_feed_forward_params: int,
    vocab_size: int,
    tied_embeddings: bool,
    seq_len: int,
) -> ModelCost:
    """Return the cost: 6 FLOPs per matrix element and token (forward 2, backward 4), and 12 per
    pair of positions and attention width, half of them with a causal mask (arXiv:2204.02311,
    appendix B). `feed_forward` counts the parameters of one block."""
    query_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    attention = 2 * dim * query_width + 2 * dim * kv_width
    norms = dim + num_layers * 2 * (dim + (head_dim if qk_norm else 0))
    output = vocab_size * dim
    embeddings = output * (1 if tied_embeddings else 2)
    active_matrices = num_layers * (attention + active_feed_forward_params)
    matrices = num_layers * (attention + feed_forward_params)
    return ModelCost(
        num_params=matrices + norms + embeddings,
        num_active_params=active_matrices + norms + embeddings,
        flops_per_token=6 * (active_matrices + output) + 6 * num_layers * query_width * seq_len,
    )
