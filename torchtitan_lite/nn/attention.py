"""Causal self-attention with grouped keys and values, and its masks.

Two kernels: torch's scaled_dot_product_attention runs anywhere; FlexAttention needs a GPU (it has
no backward on the CPU in torch 2.13) and skips the blocks that a document mask empties.
Layer: above spec; `nn.rope`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.nn.rope import rotate

Backend = Literal["sdpa", "flex"]


@dataclass(frozen=True)
class BlockContext:
    """What every block of a forward pass needs beside its input; created once per forward.

    A plain object and not a pytree: FSDP casts the floating-point tensors among a block's arguments
    to its compute dtype, and the rotations must stay float32.
    """

    cos_BS1E: torch.Tensor
    sin_BS1E: torch.Tensor
    mask: Any
    """None for plain causal attention; else a bool tensor [B, 1, S, S] or a Flex BlockMask."""
    positions_BS: torch.Tensor
    rng_keys_B: torch.Tensor


class AttentionMask(nn.Module):
    """The causal mask, optionally within documents. A module, so that context parallelism can
    replace it."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend: Backend = backend

    def forward(self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None) -> Any:
        """Return a bool tensor [B, 1, S, S] or a Flex BlockMask; None if the kernel's causal path
        suffices."""
        length, device = positions_BS.shape[1], positions_BS.device
        if self.backend == "flex":
            if documents_BS is None:
                return _causal_block_mask(length, device)
        elif documents_BS is None:
            return None
        everywhere = torch.arange(length, device=device)
        return attention_mask(everywhere, everywhere, documents_BS, self.backend)


def attention_mask(
    queries_Q: torch.Tensor,
    keys_K: torch.Tensor,
    documents_BS: torch.Tensor | None,
    backend: Backend,
) -> Any:
    """Return which keys each query attends to, by their positions in the sequence: a bool tensor
    [B or 1, 1, Q, K], or a Flex BlockMask."""
    if backend == "flex":
        return _visible_blocks(queries_Q, keys_K, documents_BS)
    past = queries_Q[:, None] >= keys_K
    if documents_BS is None:
        return past[None, None]
    same = documents_BS[:, queries_Q, None] == documents_BS[:, None, keys_K]
    return (same & past)[:, None]


class Attention(nn.Module):
    """Grouped-query attention with `num_kv_heads` key/value heads (arXiv:2305.13245). With
    `qk_norm_eps` each head of queries and keys is normalized before its rotation
    (arXiv:2302.05442)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        backend: Backend,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.wq = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.q_norm = _head_norm(head_dim, qk_norm_eps)
        self.k_norm = _head_norm(head_dim, qk_norm_eps)
        self.kernel: nn.Module = FlexKernel() if backend == "flex" else SDPAKernel()

    def forward(self, x_BSD: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """[B, S, D] -> [B, S, D]."""
        q_BSHE = self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHE = rotate(self.q_norm(q_BSHE), context.cos_BS1E, context.sin_BS1E)
        k_BSKE = rotate(self.k_norm(k_BSKE), context.cos_BS1E, context.sin_BS1E)
        out_BHSE = self.kernel(
            q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2), context.mask
        )
        return self.wo(out_BHSE.transpose(1, 2).flatten(-2))


_SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""In order of preference, the same on every GPU and torch version. torch prefers cuDNN's kernel on
Hopper, where it is the fastest, only in newer versions."""


class SDPAKernel(nn.Module):
    """torch's fused attention."""

    def forward(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSE: torch.Tensor,
        mask_B1SS: torch.Tensor | None,
    ) -> torch.Tensor:
        # On a CPU the context would only cost time.
        chosen = sdpa_kernel(_SDPA_BACKENDS, set_priority=True) if q_BHSE.is_cuda else nullcontext()
        with chosen:
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


def _head_norm(head_dim: int, eps: float | None) -> nn.Module:
    return nn.Identity() if eps is None else nn.RMSNorm(head_dim, eps=eps)


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


def _visible_blocks(
    queries_Q: torch.Tensor, keys_K: torch.Tensor, documents_BS: torch.Tensor | None
) -> Any:
    def past(b: Any, h: Any, q: Any, k: Any) -> Any:
        return queries_Q[q] >= keys_K[k]

    def same_document_past(b: Any, h: Any, q: Any, k: Any) -> Any:
        assert documents_BS is not None
        same = documents_BS[b, queries_Q[q]] == documents_BS[b, keys_K[k]]
        return same & (queries_Q[q] >= keys_K[k])

    batch = None if documents_BS is None else len(documents_BS)
    return _compiled_block_mask()(
        past if documents_BS is None else same_document_past,
        batch,
        None,
        len(queries_Q),
        len(keys_K),
        device=queries_Q.device,
    )
