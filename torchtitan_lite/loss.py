"""Cross entropy as a sum over target tokens, fused with the output projection.

The sum is divided once, by the step's global number of target tokens, when the gradient is
scaled; nothing here divides. Forward makes the gradient of one chunk of tokens at a time, so the
logits of all tokens are never held. Layer: above spec.
"""

from collections.abc import Callable

import torch

from torchtitan_lite.spec import IGNORE, TokenLoss

_LOGITS_PER_CHUNK = 1 << 24
_MIN_CHUNK_TOKENS = 512

_Chunk = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]


def cross_entropy(*, compile_backend: str | None = None) -> TokenLoss:
    """The loss of the trainer. With `compile_backend`, a chunk's arithmetic is compiled."""
    chunk: _Chunk = _chunk_loss_and_gradients
    if compile_backend is not None:
        chunk = torch.compile(chunk, backend=compile_backend)

    def loss(
        hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor
    ) -> torch.Tensor:
        # Asked here, since inside the Function nothing knows of an outer `no_grad`.
        learns = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
        return _ChunkedCrossEntropy.apply(
            hidden_TD, weight_VD, targets_T, chunk if learns else _chunk_loss
        )

    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """-log softmax(hidden @ weight.T)[target], summed over targets that are not `IGNORE`."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, chunk: _Chunk):  # type: ignore[override]
        size = max(_MIN_CHUNK_TOKENS, _LOGITS_PER_CHUNK // weight_VD.shape[0])
        total, hidden_grads, weight_grad = None, [], None
        for start in range(0, hidden_TD.shape[0], size):
            part = slice(start, start + size)
            summed, hidden_grad, chunk_weight_grad = chunk(
                hidden_TD[part], weight_VD, targets_T[part]
            )
            total = summed if total is None else total + summed
            hidden_grads.append(hidden_grad)
            # Chunks add up in float32: in bfloat16 the later ones would be lost.
            if weight_grad is None:
                weight_grad = chunk_weight_grad
            else:
                weight_grad = weight_grad.to(_accumulator(weight_VD.dtype)) + chunk_weight_grad
        assert total is not None and weight_grad is not None
        if chunk is not _chunk_loss:
            hidden_grad = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads)
            ctx.save_for_backward(hidden_grad, weight_grad.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[override]
        hidden_grad, weight_grad = ctx.saved_tensors
        return (
            hidden_grad * upstream.to(hidden_grad.dtype) if ctx.needs_input_grad[0] else None,
            weight_grad * upstream.to(weight_grad.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def _chunk_loss_and_gradients(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, targets_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss of a chunk of C tokens, and its gradients for hidden states and weight."""
    logits_CV = (hidden_CD @ weight_VD.T).to(_accumulator(hidden_CD.dtype))
    counted_C1 = (targets_C != IGNORE)[:, None]
    picked_C1 = targets_C.clamp_min(0)[:, None]
    normalizer_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
    losses_C1 = (normalizer_C1 - logits_CV.gather(1, picked_C1)) * counted_C1
    grad_CV = (logits_CV - normalizer_C1).exp()
    grad_CV = grad_CV.scatter_add(1, picked_C1, -torch.ones_like(normalizer_C1)) * counted_C1
    grad_CV = grad_CV.to(hidden_CD.dtype)
    return losses_C1.sum(), grad_CV @ weight_VD, grad_CV.T @ hidden_CD


def _chunk_loss(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, targets_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The summed loss alone, for validation; the gradients are empty."""
    logits_CV = (hidden_CD @ weight_VD.T).to(_accumulator(hidden_CD.dtype))
    picked_C1 = targets_C.clamp_min(0)[:, None]
    losses_C1 = logits_CV.logsumexp(dim=-1, keepdim=True) - logits_CV.gather(1, picked_C1)
    none = hidden_CD.new_empty(0)
    return (losses_C1 * (targets_C != IGNORE)[:, None]).sum(), none, none


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """float32, or wider when the input is."""
    return torch.promote_types(dtype, torch.float32)
