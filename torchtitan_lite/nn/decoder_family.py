"""What all families of `nn.decoder.Decoder` share: the module and the spec, from dimensions with
the same names. Layer: above spec; `nn.attention`, `nn.decoder`, `nn.decoder_spec`,
`nn.feed_forward`, `nn.moe`, `nn.rope`."""

from typing import Protocol

from torch import nn

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.nn.attention import Attention, Backend
from torchtitan_lite.nn.decoder import Decoder, DecoderBlock
from torchtitan_lite.nn.decoder_spec import (
    decoder_cost,
    decoder_init,
    decoder_shard_plan,
    decoder_stage_units,
)
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.nn.moe import MoE, MoEDims
from torchtitan_lite.nn.rope import RopeScaling, RotaryEmbedding
from torchtitan_lite.spec import HuggingFaceModel, ModelCost, ModelSpec, TorchtitanKey


class DecoderDims(Protocol):
    """Dimensions of all families."""

    @property
    def dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def tied_embeddings(self) -> bool: ...
    @property
    def attention_backend(self) -> Backend: ...
    @property
    def document_mask(self) -> bool: ...
    @property
    def dropout(self) -> float: ...


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise ConfigError if the query heads are not a multiple of the key/value heads."""
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads}).")


def check_head_width(head_dim: int) -> None:
    """Raise ConfigError if the head dim is odd, because RoPE rotates pairs."""
    if head_dim % 2:
        raise ConfigError(f"The width of a head ({head_dim}) must be even for RoPE.")


def build_decoder(
    dims: DecoderDims,
    *,
    head_dim: int,
    feed_forward: int | MoEDims,
    rope_scaling: RopeScaling | None = None,
    qk_norm: bool = False,
) -> Decoder:
    """Build the module, with parameters as the current default device creates them. `feed_forward`
    is the width of a dense block, or the experts in its place."""

    def block() -> DecoderBlock:
        return DecoderBlock(
            dim=dims.dim,
            norm_eps=dims.norm_eps,
            attention=Attention(
                dims.dim,
                dims.num_heads,
                dims.num_kv_heads,
                head_dim,
                dims.attention_backend,
                qk_norm_eps=dims.norm_eps if qk_norm else None,
            ),
            feed_forward=_feed_forward(dims.dim, feed_forward),
            dropout=dims.dropout,
        )

    return Decoder(
        dim=dims.dim,
        vocab_size=dims.vocab_size,
        norm_eps=dims.norm_eps,
        rotary=RotaryEmbedding(head_dim, dims.rope_theta, rope_scaling),
        blocks=[block() for _ in range(dims.num_layers)],
        attention_backend=dims.attention_backend,
        tied_embeddings=dims.tied_embeddings,
        dropout=dims.dropout,
    )


def decoder_model_spec(
    dims: DecoderDims,
    *,
    name: str,
    flavor: str,
    head_dim: int,
    feed_forward: int | MoEDims,
    rope_scaling: RopeScaling | None = None,
    qk_norm: bool = False,
    torchtitan_keys: tuple[TorchtitanKey, ...] = (),
    hugging_face: HuggingFaceModel | None = None,
) -> ModelSpec:
    """Return the spec of the module that `build_decoder` builds."""
    moe = feed_forward if isinstance(feed_forward, MoEDims) else None
    inside = "feed_forward{}.weight" if moe is None else "feed_forward.experts{}"
    sharded_sizes = [("key/value heads", dims.num_kv_heads)]
    if isinstance(feed_forward, int):
        sharded_sizes.append(("features of the feed-forward block", feed_forward))
    return ModelSpec(
        name=name,
        flavor=flavor,
        dims=dims,
        vocab_size=dims.vocab_size,
        num_layers=dims.num_layers,
        max_seq_len=dims.max_seq_len,
        document_mask=dims.document_mask,
        build=lambda: build_decoder(
            dims,
            head_dim=head_dim,
            feed_forward=feed_forward,
            rope_scaling=rope_scaling,
            qk_norm=qk_norm,
        ),
        init=decoder_init(
            dim=dims.dim,
            num_layers=dims.num_layers,
            residual_matrices=(
                "attention.wo.weight",
                inside.format(".w2"),
                inside.format(".w3"),
            ),
            tied_embeddings=dims.tied_embeddings,
        ),
        shard_plan=decoder_shard_plan(qk_norm=qk_norm, moe=moe),
        num_heads=dims.num_heads,
        num_experts=0 if moe is None else moe.num_experts,
        expert_width=0 if moe is None else moe.hidden_dim,
        expert_capacity_factor=None if moe is None else moe.capacity_factor,
        stage_units=decoder_stage_units(dims.num_layers),
        tied_units=("tok_embeddings", "output") if dims.tied_embeddings else None,
        width=dims.dim,
        sharded_sizes=tuple(sharded_sizes),
        # Tied weights are one parameter of two modules, which only their parent can gather once.
        extra_fsdp_units=() if dims.tied_embeddings else ("tok_embeddings", "output"),
        torchtitan_keys=torchtitan_keys,
        hugging_face=hugging_face,
        cost=lambda seq_len: _cost(dims, head_dim, feed_forward, qk_norm, seq_len),
    )


def _feed_forward(dim: int, feed_forward: int | MoEDims) -> nn.Module:
    if isinstance(feed_forward, MoEDims):
        return MoE(dim, feed_forward)
    return FeedForward(dim, feed_forward)


def _cost(
    dims: DecoderDims, head_dim: int, feed_forward: int | MoEDims, qk_norm: bool, seq_len: int
) -> ModelCost:
    if isinstance(feed_forward, MoEDims):
        params = feed_forward.num_params(dims.dim)
        active = feed_forward.num_active_params(dims.dim)
    else:
        params = active = 3 * dims.dim * feed_forward
    return decoder_cost(
        dim=dims.dim,
        num_layers=dims.num_layers,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=head_dim,
        qk_norm=qk_norm,
        feed_forward_params=params,
        active_feed_forward_params=active,
        vocab_size=dims.vocab_size,
        tied_embeddings=dims.tied_embeddings,
        seq_len=seq_len,
    )
