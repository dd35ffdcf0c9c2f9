"""A decoder-only language model made of layers, each with its own kinds of attention and
feed-forward block.

A family is a list of `DecoderLayer`s, which are data; the order of embedding, blocks, norm and
output is the same for all. The loss is computed inside the output module, because it is fused with
the projection and because sharded weights are gathered only inside their module's forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.nn.attention import (
    AttentionDims,
    AttentionMask,
    Backend,
    BlockContext,
)
from torchtitan_lite.nn.attention_scores import soft_capped
from torchtitan_lite.nn.draws import Site, layer_keys
from torchtitan_lite.nn.dropout import KeyedDropout
from torchtitan_lite.nn.feed_forward import FeedForwardDims
from torchtitan_lite.nn.norm import RMS_NORM, NormKind
from torchtitan_lite.nn.spec import TokenLoss


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """The parts of one layer."""

    attention: AttentionDims
    feed_forward: FeedForwardDims
    norms: Literal["before", "after", "both"] = "before"
    """Where norms are: at the input of attention and feed-forward, at their output, or both."""
    parallel: Literal["shared_norm", "two_norms"] | None = None
    """Set: attention and feed-forward read the same hidden states (arXiv:2204.02311, section 2),
    normalized by one norm, or by one each."""

    def __post_init__(self) -> None:
        if self.parallel is not None and self.norms != "before":
            raise ConfigError(
                f"A layer that is parallel ({self.parallel}) has norms before its blocks, not "
                f"norms = {self.norms!r}."
            )

    @property
    def norm_names(self) -> tuple[str, ...]:
        """The norms that it has."""
        before, after = ("attention_norm", "ffn_norm"), ("attention_out_norm", "ffn_out_norm")
        if self.parallel == "shared_norm":
            return before[:1]
        return before * (self.norms != "after") + after * (self.norms != "before")


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constant factors of a decoder (arXiv:2203.03466, as in Granite)."""

    embedding: float = 1.0
    """Of the embedded tokens."""
    residual: float = 1.0
    """Of what a block adds to the hidden states."""
    logits: float = 1.0


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); or with norms elsewhere, or both at
    once, as the layer has them."""

    def __init__(
        self,
        *,
        dim: int,
        norm_eps: float,
        layer: DecoderLayer,
        attention_backend: Backend,
        dropout: float,
        residual: float = 1.0,
        norm: NormKind = RMS_NORM,
    ) -> None:
        """`residual` is `Multipliers.residual`."""
        super().__init__()
        self._residual = residual
        self.attention = layer.attention.build(dim, attention_backend)
        self.feed_forward = layer.feed_forward.build(dim)
        self._is_parallel = layer.parallel is not None

        def norm_named(name: str) -> nn.Module:
            return norm.build(dim, norm_eps) if name in layer.norm_names else nn.Identity()

        self.attention_norm, self.ffn_norm = norm_named("attention_norm"), norm_named("ffn_norm")
        self.attention_out_norm = norm_named("attention_out_norm")
        self.ffn_out_norm = norm_named("ffn_out_norm")
        self._shares_norm = layer.parallel == "shared_norm"
        self.attention_dropout = KeyedDropout(dropout, Site.ATTENTION_DROPOUT)
        self.ffn_dropout = KeyedDropout(dropout, Site.FEED_FORWARD_DROPOUT)

    def forward(self, x_BSD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        keys, positions = context.rng_keys_B, context.positions_BS
        normed_BSD = self.attention_norm(x_BSD)
        update = self._scaled(self.attention_out_norm(self.attention(normed_BSD, context)))
        attended_BSD = x_BSD + self.attention_dropout(update, keys, positions)
        if not self._shares_norm:
            normed_BSD = self.ffn_norm(x_BSD if self._is_parallel else attended_BSD)
        update = self._scaled(self.ffn_out_norm(self.feed_forward(normed_BSD)))
        return attended_BSD + self.ffn_dropout(update, keys, positions)

    def _scaled(self, update_BSD: torch.Tensor) -> torch.Tensor:
        return update_BSD if self._residual == 1.0 else update_BSD * self._residual


class PredictionBlock(DecoderBlock):
    """A module of multi-token prediction (arXiv:2412.19437, section 2.2): a block on the states of
    the depth before, behind its last norm, and the embedding of the token at its own depth. Norms
    and projection are ordered as in transformers' `MtpLayer`."""

    def __init__(
        self,
        *,
        dim: int,
        norm_eps: float,
        layer: DecoderLayer,
        attention_backend: Backend,
        dropout: float,
        residual: float = 1.0,
        norm: NormKind = RMS_NORM,
    ) -> None:
        super().__init__(
            dim=dim,
            norm_eps=norm_eps,
            layer=layer,
            attention_backend=attention_backend,
            dropout=dropout,
            residual=residual,
            norm=norm,
        )
        self.enorm = norm.build(dim, norm_eps)
        self.hnorm = norm.build(dim, norm_eps)
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)
        self.head_norm = norm.build(dim, norm_eps)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BSD: torch.Tensor, context: BlockContext, embedded_BSD: torch.Tensor
    ) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]; `embedded_BSD` are the embeddings of future tokens."""
        both = torch.cat([self.enorm(embedded_BSD), self.hnorm(x_BSD)], dim=-1)
        return self.head_norm(super().forward(self.eh_proj(both), context))


class _Joined(torch.autograd.Function):
    """The identity of two tensors, as one node of autograd. Schedules that split the backward look
    for the nodes in which the paths from a weight meet those from the stage's input, and fail if a
    weight has several (torch 2.13: "Trying to backward through the graph a second time")."""

    @staticmethod
    def forward(
        ctx: Any, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return first.view_as(first), second.view_as(second)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


@dataclass(frozen=True, kw_only=True)
class OutputDims:
    """What the output projection has beside a weight."""

    bias: bool = False
    soft_cap: float | None = None
    """Set: the bound of the logits, to which tanh maps them."""

    def __post_init__(self) -> None:
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ConfigError(f"The soft cap of logits ({self.soft_cap}) must be above 0.")


PLAIN_OUTPUT = OutputDims()


class OutputProjection(nn.Module):
    """Hidden states -> logits, or -> the loss when one is given."""

    def __init__(self, dim: int, vocab_size: int, dims: OutputDims = PLAIN_OUTPUT) -> None:
        super().__init__()
        self.soft_cap = dims.soft_cap
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if dims.bias else None

    def forward(
        self,
        hidden_BSD: torch.Tensor,
        targets_BS: torch.Tensor | None = None,
        loss: TokenLoss | None = None,
    ) -> torch.Tensor:
        """Return logits [B, S, V], or the 0-d sum of the loss over the targets."""
        if loss is None or targets_BS is None:
            return self.capped(F.linear(hidden_BSD, self.weight, self.bias))
        return self.loss_of(loss, hidden_BSD, self.weight, self.bias, targets_BS)

    def capped(self, logits_BSV: torch.Tensor) -> torch.Tensor:
        """Return logits with the soft cap, if there is one."""
        return logits_BSV if self.soft_cap is None else soft_capped(logits_BSV, self.soft_cap)

    def loss_of(
        self,
        loss: TokenLoss,
        hidden_BSD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_BS: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Return the loss with weights of the vocabulary, or of a shard of it, which `options`
        describe."""
        if bias_V is not None:
            # The weight of a number that is always 1: losses know no bias.
            ones = hidden_BSD.new_ones(*hidden_BSD.shape[:-1], 1)
            hidden_BSD = torch.cat([hidden_BSD, ones], dim=-1)
            weight_VD = torch.cat([weight_VD, bias_V[:, None]], dim=-1)
        if self.soft_cap is not None:
            options["soft_cap"] = self.soft_cap
        return loss(hidden_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), **options)


class Decoder(nn.Module):
    """Embedding, blocks, norm, output."""

    def __init__(
        self,
        *,
        dim: int,
        vocab_size: int,
        norm_eps: float,
        layers: Sequence[DecoderLayer],
        attention_backend: Backend,
        tied_embeddings: bool,
        dropout: float,
        pad_token_id: int | None = None,
        prediction_layers: Sequence[DecoderLayer] = (),
        prediction_loss_weight: float = 0.0,
        norm: NormKind = RMS_NORM,
        multipliers: Multipliers | None = None,
        output: OutputDims = PLAIN_OUTPUT,
    ) -> None:
        """The embedding of `pad_token_id` gets no gradient as an input. `prediction_layers` predict
        further tokens in training, one each. Their losses add `prediction_loss_weight` times their
        mean to the objective, not to the returned loss. `norm` is that of
        hidden states."""
        super().__init__()
        self._multipliers = multipliers or Multipliers()
        self._prediction_weight = prediction_loss_weight / max(1, len(prediction_layers))
        all_layers = [*layers, *prediction_layers]
        kinds = [layer.attention for layer in all_layers]
        # Each once, however many layers share it.
        masks = list(dict.fromkeys(kind.mask for kind in kinds if kind.mask is not None))
        ropes = list(dict.fromkeys(kind.rope for kind in kinds if kind.rope is not None))
        self.masks = nn.ModuleList(AttentionMask(attention_backend, mask) for mask in masks)
        self.rotaries = nn.ModuleList(rope.build() for rope in ropes)
        self._kinds = {
            str(number): (
                None if kind.mask is None else masks.index(kind.mask),
                None if kind.rope is None else ropes.index(kind.rope),
            )
            for number, kind in enumerate(kinds)
        }
        """The mask and the rotary embedding of each layer."""
        self.tok_embeddings = nn.Embedding(vocab_size, dim, pad_token_id)
        self.layers = nn.ModuleDict(
            {
                str(number): (DecoderBlock if number < len(layers) else PredictionBlock)(
                    dim=dim,
                    norm_eps=norm_eps,
                    layer=layer,
                    attention_backend=attention_backend,
                    dropout=dropout,
                    residual=self._multipliers.residual,
                    norm=norm,
                )
                for number, layer in enumerate(all_layers)
            }
        )
        self.norm = norm.build(dim, norm_eps)
        self.output = OutputProjection(dim, vocab_size, output)
        self.tied_embeddings = tied_embeddings
        self._tie()

    def forward(
        self,
        tokens_BS: torch.Tensor,
        *,
        positions_BS: torch.Tensor,
        rng_keys_B: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
        targets_BS: torch.Tensor | None = None,
        loss: TokenLoss | None = None,
        future_tokens_BJS: torch.Tensor | None = None,
        future_targets_BJS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map tokens to logits [B, S, V], or to the loss summed over `targets_BS` if `loss` is
        given. A pipeline stage has only some of the modules: it takes hidden states in place of
        `tokens_BS` unless it is the first, and without the output it returns them."""
        contexts = self.contexts(positions_BS, rng_keys_B, documents_BS)
        # The last stage has an embedding too, for future tokens.
        is_first = not tokens_BS.is_floating_point()
        x_BSD = self._embedded(tokens_BS) if is_first else tokens_BS
        for layer, block in self.layers.items():
            if not isinstance(block, PredictionBlock):
                x_BSD = block(x_BSD, contexts[layer])
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        if self.output is None:
            return x_BSD
        # Scales the logits, without a copy of them.
        x_BSD = x_BSD if self._multipliers.logits == 1.0 else x_BSD * self._multipliers.logits
        result = self.output(x_BSD, targets_BS, loss)
        if not self.training or loss is None or future_tokens_BJS is None:
            return result
        assert future_targets_BJS is not None
        further = self._further_losses(x_BSD, contexts, loss, future_tokens_BJS, future_targets_BJS)
        # The gradient of the sum, and the value of the first.
        return result + (further - further.detach())

    def _embedded(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.tok_embeddings(tokens_BS)
        factor = self._multipliers.embedding
        return x_BSD if factor == 1.0 else x_BSD * factor

    def _further_losses(
        self,
        x_BSD: torch.Tensor,
        contexts: Mapping[str, BlockContext],
        loss: TokenLoss,
        tokens_BJS: torch.Tensor,
        targets_BJS: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of the losses of multi-token prediction. `x_BSD` are the states
        behind the last norm."""
        # Once for all depths, because sharded weights are gathered for each use.
        embedded_BJSD = self.tok_embeddings(tokens_BJS.flatten(0, 1)).unflatten(
            0, tokens_BJS.shape[:2]
        )
        x_BSD, embedded_BJSD = _Joined.apply(x_BSD, embedded_BJSD)
        states = []
        for layer, block in self.layers.items():
            if isinstance(block, PredictionBlock):
                x_BSD = block(x_BSD, contexts[layer], embedded_BJSD[:, len(states)])
                states.append(x_BSD)
        further_BSD = torch.stack(states, dim=1).flatten(0, 1)
        total = self.output(further_BSD, targets_BJS.flatten(0, 1), loss)
        return total * self._prediction_weight

    def contexts(
        self,
        positions_BS: torch.Tensor,
        rng_keys_B: torch.Tensor,
        documents_BS: torch.Tensor | None,
    ) -> dict[str, BlockContext]:
        """Return the context of each layer that this part of the model has. Layers of one kind
        share their mask and rotations. Keys and not modules differ between blocks, so that the
        compiler sees all blocks of a kind as one."""
        kinds = {layer: self._kinds[layer] for layer in self.layers}
        rotations = {
            rope: (None, None) if rope is None else self.rotaries[rope](positions_BS)
            for rope in dict.fromkeys(rope for _, rope in kinds.values())
        }
        masks = {
            mask: None if mask is None else self.masks[mask](positions_BS, documents_BS)
            for mask in dict.fromkeys(mask for mask, _ in kinds.values())
        }
        keys = layer_keys(rng_keys_B, len(self._kinds)) if self.training else None

        def context(layer: str) -> BlockContext:
            mask, rope = kinds[layer]
            cos, sin = rotations[rope]
            keys_B = rng_keys_B if keys is None else keys[int(layer)]
            return BlockContext(cos, sin, masks[mask], positions_BS, keys_B, documents_BS)

        return {layer: context(layer) for layer in kinds}

    def _apply(self, fn, recurse: bool = True) -> Self:
        """As nn.Module, but keep a tied weight one parameter: `to_empty` on a meta model would
        untie it."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.tied_embeddings and self.tok_embeddings is not None and self.output is not None:
            # Not the attribute, which a single rank in mixed precision reads as a cast.
            (self.output.weight,) = self.tok_embeddings.parameters(recurse=False)
