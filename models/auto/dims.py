"""Dimensions of a decoder of transformers, with the switches that its architectures differ in."""

from dataclasses import dataclass, replace
from typing import Literal

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.models.auto.experts import EXPERT_ROWS
from torchtitan_lite.models.auto.gated import GATED_ROWS
from torchtitan_lite.models.auto.plain import UNGATED_ROWS
from torchtitan_lite.nn.decoder import DecoderLayer, Multipliers, OutputDims
from torchtitan_lite.nn.feed_forward import Activation, Dense
from torchtitan_lite.nn.grouped_decoder import GroupedDecoderDims
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.rope import Rope, RopeBase

ARCHITECTURES = (*GATED_ROWS, *UNGATED_ROWS, *EXPERT_ROWS)


@dataclass(frozen=True, kw_only=True)
class AutoDims(GroupedDecoderDims):
    """The dimensions of one flavor."""

    model_type: str
    """The architecture in transformers, a row of the family."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts, of width `hidden_dim`, if others have experts."""
    norms: Literal["before", "after", "both"] = "before"
    """Where norms are: at the input of attention and feed-forward, at their output, or both."""
    parallel: Literal["shared_norm", "two_norms"] | None = None
    """Set: attention and feed-forward read the same hidden states, with one norm or one each."""
    qk_norm: Literal["each_head", "all_heads"] | None = None
    """Set: queries and keys are normalized, each head or all heads together."""
    norms_rotated: bool = False
    """Whether heads are normalized after their rotation, and not before."""
    layers_without_rope: tuple[int, ...] = ()
    """Layers without rotary embedding."""
    windowed_rope: RopeBase | None = None
    """Rotary embedding of the layers with a window. Unset: that of the others."""
    rotated_share: float = 1.0
    """Share of a head that is rotated."""
    rotated_width: int | None = None
    """Width of the rotated part of a head. Unset: that of `rotated_share`, rounded down."""
    rotates_adjacent: bool = False
    """Whether the two numbers of a rotated pair are adjacent, and not half a head apart."""
    activation: Activation = "silu"
    """Of the feed-forward block."""
    gated: bool = True
    """Whether the feed-forward block has a gate."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    """Factor of the scores. Unset: 1 / sqrt(head_dim)."""
    projection_clip: float | None = None
    """Bound of the projected queries, keys and values. Unset: none."""
    attention_soft_cap: float | None = None
    """Bound of the scores, to which tanh maps them. Unset: none."""
    has_sinks: bool = False
    """Whether each head has a sink (`nn.attention_sinks`)."""
    fused_heads: bool = False
    """Whether the projections of queries, keys and values are one."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    logits_soft_cap: float | None = None
    """Bound of the logits. Unset: none."""
    logits_multiplier: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rotated_share <= 1:
            raise ConfigError(
                f"rotated_share ({self.rotated_share}) must be above 0 and at most 1."
            )
        if self.rotated_width is not None and not 0 < self.rotated_width <= self.head_size:
            raise ConfigError(
                f"rotated_width ({self.rotated_width}) must be above 0 and at most "
                f"{self.head_size}, the width of a head."
            )
        super().__post_init__()
        if self.output_bias and self.tied_embeddings:
            raise ConfigError(
                "An output with the weight of the embedding (tied_embeddings) has no bias of its "
                "own (output_bias). Set one of them to false."
            )
        if self.output_bias and self.multipliers.logits != 1:
            raise ConfigError(
                "Multiplied logits (logits_multiplier, logits_divisor) have no bias (output_bias): "
                "the factor is that of the hidden states."
            )

    @property
    def output(self) -> OutputDims:
        """What the output projection has beside a weight."""
        return OutputDims(bias=self.output_bias, soft_cap=self.logits_soft_cap)

    @property
    def multipliers(self) -> Multipliers:
        """Constant factors."""
        return Multipliers(
            embedding=self.embedding_multiplier,
            residual=self.residual_multiplier,
            logits=self.logits_multiplier / self.logits_divisor,
        )

    def dense(self, hidden_dim: int) -> Dense:
        """Return the feed-forward of dense layers."""
        dense = super().dense(hidden_dim)
        return replace(dense, activation=self.activation, gated=self.gated)

    def stored_as(self) -> str:
        return self.model_type

    def layer(self, layer: int) -> DecoderLayer:
        """Return the parts of a layer."""
        feed_forward = self.moe
        if feed_forward is None or layer in self.dense_layers:
            assert self.hidden_dim is not None
            feed_forward = self.dense(self.hidden_dim)
        return DecoderLayer(
            attention=self.attention(layer),
            feed_forward=feed_forward,
            norms=self.norms,
            parallel=self.parallel,
        )

    def check_blocks(self) -> None:
        """Raise ConfigError if there is no width for a kind of layer."""
        if self.hidden_dim is None and (self.moe is None or self.dense_layers):
            raise ConfigError(
                f"Give hidden_dim, the width of dense layers: {self.dense_layers or 'all'} are."
            )

    def attention(self, layer: int) -> GroupedQuery:
        """Return the attention of a layer."""
        return replace(
            super().attention(layer),
            qk_norm_eps=None if self.qk_norm is None else self.norm_eps,
            qk_norm=self.norm,
            norms_all_heads=self.qk_norm == "all_heads",
            norms_rotated=self.norms_rotated,
            scale=self.attention_multiplier,
            projection_clip=self.projection_clip,
            soft_cap=self.attention_soft_cap,
            has_sinks=self.has_sinks,
            fused=self.fused_heads,
            rotation=self._rotation(layer),
            rotates_adjacent=self.rotates_adjacent,
        )

    def _rotation(self, layer: int) -> Rope | None:
        if layer in self.layers_without_rope:
            return None
        base = RopeBase(theta=self.rope_theta, scaling=self.rope_scaling)
        if self.is_windowed(layer) and self.windowed_rope is not None:
            base = self.windowed_rope
        width = self.rotated_width or int(self.head_size * self.rotated_share)
        return Rope(head_dim=width, theta=base.theta, scaling=base.scaling)
