"""Attention with sinks: a learned score per head that takes part in the softmax and has no value
(arXiv:2309.17453, as in gpt-oss).

A sink multiplies the output of plain attention by sigmoid(lse - sink), with lse the log-sum-exp of
the scores. Its log-sum-exp, which includes the sink, makes the fused backward of plain attention
that of attention with sinks.
"""

from typing import Any

import torch
from torch import nn

from torchtitan_lite.distributed.torch_compat import attention_backward, attention_with_lse
from torchtitan_lite.nn.attention import Backend, compiled_flex
from torchtitan_lite.nn.attention_scores import plain_attention


class SinkKernel(nn.Module):
    """Attention with sinks, by the CPU's fused kernel, FlexAttention, or plain operations."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend: Backend = backend

    def forward(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSE: torch.Tensor,
        mask: Any,
        sinks_H: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output [B, H, S, E]. `mask` is that of the backend; None: causal."""
        if self.backend == "flex":
            out_BHSE, lse_BHS = compiled_flex()(
                q_BHSE, k_BKSE, v_BKSE, block_mask=mask, enable_gqa=True, return_lse=True
            )
            share_BHS = torch.sigmoid(lse_BHS - sinks_H[:, None])
            return out_BHSE * share_BHS[..., None].to(out_BHSE.dtype)
        copies = q_BHSE.shape[1] // k_BKSE.shape[1]
        k_BHSE, v_BHSE = (x.repeat_interleave(copies, dim=1) for x in (k_BKSE, v_BKSE))
        if q_BHSE.is_cpu:
            bias = None
            if mask is not None:
                bias = q_BHSE.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
            return _SinkAttention.apply(q_BHSE, k_BHSE, v_BHSE, bias, sinks_H)
        return plain_attention(q_BHSE, k_BHSE, v_BHSE, mask, sinks_H=sinks_H)


class _SinkAttention(torch.autograd.Function):
    """The CPU's fused kernel, with sinks."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q_BHSE: torch.Tensor,
        k_BHSE: torch.Tensor,
        v_BHSE: torch.Tensor,
        bias: torch.Tensor | None,
        sinks_H: torch.Tensor,
    ) -> torch.Tensor:
        is_causal = bias is None
        out_BHSE, lse_BHS = attention_with_lse(q_BHSE, k_BHSE, v_BHSE, is_causal, bias=bias)
        sinks_H1 = sinks_H[:, None].to(lse_BHS.dtype)
        total_BHS = torch.logaddexp(lse_BHS, sinks_H1)
        out_BHSE = (out_BHSE * (lse_BHS - total_BHS).exp()[..., None]).to(q_BHSE.dtype)
        ctx.save_for_backward(q_BHSE, k_BHSE, v_BHSE, bias, sinks_H, out_BHSE, total_BHS)
        return out_BHSE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BHSE, k_BHSE, v_BHSE, bias, sinks_H, out_BHSE, total_BHS = ctx.saved_tensors
        grad_BHSE = grads[0].contiguous()
        inputs = attention_backward(
            grad_BHSE, q_BHSE, k_BHSE, v_BHSE, out_BHSE, total_BHS, bias is None, bias=bias
        )
        # The derivative of the softmax by the score of a position without a value.
        moved_BHS = (grad_BHSE.to(total_BHS.dtype) * out_BHSE).sum(-1)
        share_BHS = (sinks_H[:, None].to(total_BHS.dtype) - total_BHS).exp()
        grad_H = -(share_BHS * moved_BHS).sum((0, 2))
        return *inputs, None, grad_H.to(sinks_H.dtype)
