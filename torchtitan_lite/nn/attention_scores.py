"""Attention by plain operations that materialize all scores, and attention whose scores have a soft
cap, cap * tanh(score / cap) (Gemma 2)."""

from functools import cache
from typing import Any

import torch
from torch import nn

from torchtitan_lite.nn.attention import Backend, compiled_flex


class SoftCapKernel(nn.Module):
    """Attention with a soft cap of scores, by FlexAttention or plain operations."""

    def __init__(self, backend: Backend, cap: float) -> None:
        super().__init__()
        self.backend: Backend = backend
        self.cap = cap

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        """Return the output [B, H, S, E]. `mask` is that of the backend; None: causal."""
        if self.backend == "flex":
            return compiled_flex()(
                q_BHSE,
                k_BKSE,
                v_BKSE,
                score_mod=_capped_score(self.cap),
                block_mask=mask,
                enable_gqa=True,
            )
        copies = q_BHSE.shape[1] // k_BKSE.shape[1]
        k_BHSE, v_BHSE = (x.repeat_interleave(copies, dim=1) for x in (k_BKSE, v_BKSE))
        return plain_attention(q_BHSE, k_BHSE, v_BHSE, mask, cap=self.cap)


def soft_capped(values: torch.Tensor, cap: float) -> torch.Tensor:
    """Return values in [-cap, cap], small ones almost unchanged."""
    return torch.tanh(values / cap) * cap


def plain_attention(
    q_BHSE: torch.Tensor,
    k_BHSE: torch.Tensor,
    v_BHSE: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of attention, with a soft cap of the scores and sinks of the heads if they
    are given. `mask` is True where a query attends; None: causal."""
    scores_BHSS = q_BHSE @ k_BHSE.transpose(-2, -1) * q_BHSE.shape[-1] ** -0.5
    if cap is not None:
        scores_BHSS = soft_capped(scores_BHSS, cap)
    if mask is None:
        mask = torch.ones_like(scores_BHSS[0, 0], dtype=torch.bool).tril()
    scores_BHSS = scores_BHSS.masked_fill(~mask, -torch.inf)
    dtype = torch.promote_types(q_BHSE.dtype, torch.float32)
    if sinks_H is None:
        return scores_BHSS.softmax(-1, dtype=dtype).to(v_BHSE.dtype) @ v_BHSE
    sinks_BHS1 = sinks_H[:, None, None].expand(*scores_BHSS.shape[:-1], 1)
    shares = torch.cat([scores_BHSS, sinks_BHS1], dim=-1).softmax(-1, dtype=dtype)[..., :-1]
    return shares.to(v_BHSE.dtype) @ v_BHSE


@cache
def _capped_score(cap: float) -> Any:
    """Return FlexAttention's modification of scores, one for each cap: another function would be
    compiled again."""

    def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return soft_capped(score, cap)

    return capped
