"""A decoder-only language model around any attention and feed-forward block.

A family chooses the blocks; the order of embedding, blocks, norm and output is the same for all.
The loss is computed inside the output module, because it is fused with the projection and because
sharded weights are gathered only inside their module's forward. Layer: above spec; `nn.attention`,
`nn.dropout`, `nn.rope`.
"""

from dataclasses import replace
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.nn.attention import Attention, AttentionMask, Backend, BlockContext
from torchtitan_lite.nn.dropout import KeyedDropout
from torchtitan_lite.nn.rope import RotaryEmbedding
from torchtitan_lite.rng import mix_tensor
from torchtitan_lite.spec import TokenLoss


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        *,
        dim: int,
        norm_eps: float,
        attention: Attention,
        feed_forward: nn.Module,
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention_dropout = KeyedDropout(dropout, site=0)
        self.ffn_dropout = KeyedDropout(dropout, site=1)

    def forward(self, x_BSD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        keys, positions = context.rng_keys_B, context.positions_BS
        update = self.attention(self.attention_norm(x_BSD), context)
        x_BSD = x_BSD + self.attention_dropout(update, keys, positions)
        update = self.feed_forward(self.ffn_norm(x_BSD))
        return x_BSD + self.ffn_dropout(update, keys, positions)


class OutputProjection(nn.Module):
    """Hidden states -> logits, or -> the loss when one is given."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self,
        hidden_BSD: torch.Tensor,
        targets_BS: torch.Tensor | None = None,
        loss: TokenLoss | None = None,
    ) -> torch.Tensor:
        """Return logits [B, S, V], or the 0-d sum of the loss over the targets."""
        if loss is None or targets_BS is None:
            return F.linear(hidden_BSD, self.weight)
        return loss(hidden_BSD.flatten(0, 1), self.weight, targets_BS.flatten())


class Decoder(nn.Module):
    """Embedding, blocks, norm, output."""

    def __init__(
        self,
        *,
        dim: int,
        vocab_size: int,
        norm_eps: float,
        rotary: RotaryEmbedding,
        blocks: list[DecoderBlock],
        attention_backend: Backend,
        tied_embeddings: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.mask = AttentionMask(attention_backend)
        self.rotary = rotary
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.output = OutputProjection(dim, vocab_size)
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
    ) -> torch.Tensor:
        """Map tokens to logits [B, S, V], or to the loss summed over `targets_BS` if `loss` is
        given. A pipeline stage has only some of the modules: without the embedding it takes hidden
        states in place of `tokens_BS`, and without the output it returns them."""
        cos, sin = self.rotary(positions_BS)
        mask = self.mask(positions_BS, documents_BS)
        context = BlockContext(cos, sin, mask, positions_BS, rng_keys_B)
        x_BSD = tokens_BS if self.tok_embeddings is None else self.tok_embeddings(tokens_BS)
        for layer, block in self.layers.items():
            x_BSD = block(x_BSD, self._of_layer(context, int(layer)))
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        return x_BSD if self.output is None else self.output(x_BSD, targets_BS, loss)

    def _of_layer(self, context: BlockContext, layer: int) -> BlockContext:
        """Return the context with keys of the layer. Keys and not modules differ between blocks, so
        that the compiler sees all blocks as one."""
        if not self.training or self.dropout == 0.0:
            return context
        return replace(context, rng_keys_B=mix_tensor(context.rng_keys_B + layer))

    def _apply(self, fn, recurse: bool = True) -> Self:
        """As nn.Module, but keep a tied weight one parameter: `to_empty` on a meta model would
        untie it."""
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.tied_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = cast(nn.Parameter, self.tok_embeddings.weight)
