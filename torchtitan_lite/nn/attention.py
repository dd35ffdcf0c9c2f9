"""Causal self-attention with grouped keys and values, and its masks.

Two kernels: torch's scaled_dot_product_attention runs anywhere; FlexAttention needs a GPU (it has
no backward on the CPU in torch 2.13) and skips the blocks that a document mask empties.
Layer: above spec; `nn.rope`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.nn.rope import rotate

Backend = Literal["sdpa", "flex"]


@dataclass(frozen=True)
class BlockContext:
    """What every block of a forward pass needs beside its input; made once per forward.

    A plain object and no pytree: FSDP casts the floating-point tensors among a block's arguments
    to its compute dtype, and the rotations must stay float32.
    """

    cos_BS1E: torch.Tensor
    sin_BS1E: torch.Tensor
    mask: Any
    """None for plain causal attention; else a bool tensor [B, 1, S, S] or a Flex BlockMask."""
    positions_BS: torch.Tensor
    keys_B: torch.Tensor


def attention_mask(
    positions_BS: torch.Tensor, documents_BS: torch.Tensor | None, backend: Backend
) -> Any:
    """The mask that keeps a token within its document and its past; None where the kernel's own
    causal path serves."""
    length, device = positions_BS.shape[1], positions_BS.device
    if backend == "flex":
        if documents_BS is None:
            return _causal_block_mask(length, device)
        return _document_block_mask(documents_BS)
    if documents_BS is None:
        return None
    same = documents_BS[:, None, :, None] == documents_BS[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=device).tril()


class Attention(nn.Module):
    """Multi-head attention with `num_kv_heads` heads of keys and values, which groups of query
    heads share (GQA, arXiv:2305.13245)."""

    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, backend: Backend
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.kernel = FlexKernel() if backend == "flex" else SDPAKernel()

    def forward(self, x_BSD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        q_BSHE = self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHE = rotate(q_BSHE, context.cos_BS1E, context.sin_BS1E)
        k_BSKE = rotate(k_BSKE, context.cos_BS1E, context.sin_BS1E)
        out_BHSE = self.kernel(
            q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2), context.mask
        )
        return self.wo(out_BHSE.transpose(1, 2).flatten(-2))


class SDPAKernel(nn.Module):
    """torch's fused attention."""

    def forward(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSE: torch.Tensor,
        mask_B1SS: torch.Tensor | None,
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q_BHSE,
            k_BKSE,
            v_BKSE,
            attn_mask=mask_B1SS,
            is_causal=mask_B1SS is None,
            enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1],
        )


class FlexKernel(nn.Module):
    """FlexAttention, compiled once for the process."""

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        return _compiled_flex()(q_BHSE, k_BKSE, v_BKSE, block_mask=mask, enable_gqa=True)


@cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def _compiled_block_mask() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


@cache
def _causal_block_mask(length: int, device: torch.device) -> Any:
    def past(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    return _compiled_block_mask()(past, None, None, length, length, device=device)


def _document_block_mask(documents_BS: torch.Tensor) -> Any:
    def same_document_past(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (documents_BS[b, q] == documents_BS[b, k])

    batch, length = documents_BS.shape
    return _compiled_block_mask()(
        same_document_past, batch, None, length, length, device=documents_BS.device
    )
