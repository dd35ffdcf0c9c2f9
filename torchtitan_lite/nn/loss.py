"""Cross entropy as a sum over target tokens, fused with the output projection; its gradient may
include that of a z-loss.

The sum is divided once, by the step's global number of target tokens, when the gradient is scaled.
Forward computes the gradient chunk by chunk, so the logits of all tokens are never materialized.
With a vocabulary sharded over ranks, forward communicates three numbers per token and backward
nothing.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from torchtitan_lite.nn.spec import IGNORE_INDEX, TokenLoss, VocabularyShard

_MIN_CHUNK_TOKENS = 512

_Chunk = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class CrossEntropy(TokenLoss, Protocol):
    """The loss of models whose logits may have a soft cap, too."""

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        shard: VocabularyShard | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Return the loss as `TokenLoss` does, of `soft_cap` * tanh(logits / `soft_cap`)."""
        ...


def cross_entropy(
    *,
    logits_per_chunk: int = 1 << 24,
    compile_backend: str | None = None,
    z_loss_weight: float = 0.0,
) -> CrossEntropy:
    """Return the trainer's loss, in chunks of at most `logits_per_chunk` logits, but at least 512
    tokens. `compile_backend` compiles the arithmetic of a chunk. `z_loss_weight` adds the z-loss
    (arXiv:2204.02311, section 5), `z_loss_weight` * log(Z)^2 per target, where Z is the sum of the
    exponentials of the logits: to the gradient only, not to the value."""
    chunk: _Chunk = _chunk_loss_and_gradients
    if compile_backend is not None:
        chunk = torch.compile(chunk, backend=compile_backend)
    if z_loss_weight:
        chunk = partial(chunk, z_loss_weight=z_loss_weight)

    def loss(
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        shard: VocabularyShard | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        # Asked here: inside an autograd function gradients are always off.
        wanted = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
        return _ChunkedCrossEntropy.apply(
            hidden_TD,
            weight_VD,
            targets_T,
            shard,
            _with_cap(chunk if wanted else _chunk_loss, soft_cap),
            wanted,
            _chunk_size(len(hidden_TD), max(_MIN_CHUNK_TOKENS, logits_per_chunk // len(weight_VD))),
        )

    return loss


def _chunk_size(num_tokens: int, max_tokens: int) -> int:
    """Return the tokens per chunk, at most `max_tokens`. Equal chunks are compiled once, so more
    than needed, but fewer than twice as many, are taken if they divide the tokens."""
    fewest = max(1, math.ceil(num_tokens / max_tokens))
    dividing = (count for count in range(fewest, 2 * fewest) if num_tokens % count == 0)
    return max(1, math.ceil(num_tokens / next(dividing, fewest)))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Compute -log softmax(hidden @ weight.T)[target], summed over targets but `IGNORE_INDEX`."""

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, shard, chunk: _Chunk, wanted, size: int):  # type: ignore[override]
        # In float64, so that the sum does not depend on how the tokens are split into chunks.
        total = hidden_TD.new_zeros((), dtype=torch.float64)
        hidden_grads: list[torch.Tensor] = []
        weight_grad: torch.Tensor | None = None
        starts = range(0, hidden_TD.shape[0], size)
        for start in starts:
            part = slice(start, start + size)
            summed, hidden_grad, grad_CV = chunk(hidden_TD[part], weight_VD, targets_T[part], shard)
            total = total + summed
            if not wanted:
                continue
            hidden_grads.append(hidden_grad)
            if len(starts) == 1:
                weight_grad = grad_CV.T @ hidden_TD
            else:
                weight_grad = _add_product(weight_grad, grad_CV.T, hidden_TD[part])
            del grad_CV  # Before the next chunk's logits.
        if weight_grad is not None:
            hidden_grad = hidden_grads[0] if len(hidden_grads) == 1 else torch.cat(hidden_grads)
            ctx.save_for_backward(hidden_grad, weight_grad.to(weight_VD.dtype))
        return total.to(_accumulator(hidden_TD.dtype))

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[override]
        hidden_grad, weight_grad = ctx.saved_tensors
        return (
            hidden_grad * upstream.to(hidden_grad.dtype) if ctx.needs_input_grad[0] else None,
            weight_grad * upstream.to(weight_grad.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
            None,
            None,
        )


def _chunk_loss_and_gradients(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_C: torch.Tensor,
    shard: VocabularyShard | None,
    z_loss_weight: float = 0.0,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the summed loss of a chunk of C tokens, and the gradients of it and of its z-loss for
    hidden states [C, D] and logits [C, V]."""
    logits_CV, slopes_CV = _logits(hidden_CD, weight_VD, soft_cap)
    rows_C1, is_mine_C1 = _rows(targets_C, weight_VD, shard)
    counted_C1 = (targets_C != IGNORE_INDEX)[:, None]
    # Few passes over the logits and few copies of them: this is most of what the loss costs.
    log_z_C1 = None
    if shard is None and not z_loss_weight:
        log_probs_CV = logits_CV.log_softmax(-1)
    else:
        log_z_C1 = _log_sum_exp(logits_CV, shard)
        log_probs_CV = logits_CV - log_z_C1
    del logits_CV
    losses_C1 = -_picked(log_probs_CV, rows_C1, is_mine_C1, shard) * counted_C1
    grad_CV = log_probs_CV.exp_()
    if z_loss_weight and log_z_C1 is not None:
        # The derivative of log(Z)^2 by the logits is 2 log(Z) softmax(logits).
        grad_CV *= 1 + 2 * z_loss_weight * log_z_C1
    grad_CV.scatter_add_(1, rows_C1, -is_mine_C1.to(grad_CV.dtype))
    grad_CV = grad_CV.mul_(counted_C1)
    if slopes_CV is not None:
        grad_CV = grad_CV.mul_(slopes_CV)
    grad_CV = grad_CV.to(hidden_CD.dtype)
    return losses_C1.sum(), grad_CV @ weight_VD, grad_CV


def _chunk_loss(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_C: torch.Tensor,
    shard: VocabularyShard | None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the summed loss alone, for validation; the gradients are empty."""
    logits_CV, _ = _logits(hidden_CD, weight_VD, soft_cap)
    rows_C1, is_mine_C1 = _rows(targets_C, weight_VD, shard)
    losses_C1 = _log_sum_exp(logits_CV, shard) - _picked(logits_CV, rows_C1, is_mine_C1, shard)
    none = hidden_CD.new_empty(0)
    return (losses_C1 * (targets_C != IGNORE_INDEX)[:, None]).sum(), none, none


def _with_cap(chunk: _Chunk, soft_cap: float | None) -> _Chunk:
    return chunk if soft_cap is None else partial(chunk, soft_cap=soft_cap)


def _logits(
    hidden_CD: torch.Tensor, weight_VD: torch.Tensor, soft_cap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits, and their derivatives by those before the soft cap if there is one."""
    logits_CV = (hidden_CD @ weight_VD.T).to(_accumulator(hidden_CD.dtype))
    if soft_cap is None:
        return logits_CV, None
    shares_CV = torch.tanh(logits_CV / soft_cap)
    return shares_CV * soft_cap, 1 - shares_CV.square()


def _add_product(
    total_VD: torch.Tensor | None, a_VC: torch.Tensor, b_CD: torch.Tensor
) -> torch.Tensor:
    """Return `total + a @ b`; chunks add up in float32, because in bfloat16 the later ones would be
    lost. `total` may be overwritten."""
    dtype = _accumulator(a_VC.dtype)
    if a_VC.is_cuda and a_VC.dtype != dtype:
        # The product itself adds: no product in bfloat16 is written, read and rounded.
        if total_VD is None:
            return torch.mm(a_VC, b_CD, out_dtype=dtype)
        return torch.addmm(total_VD, a_VC, b_CD, out_dtype=dtype, out=total_VD)
    product_VD = (a_VC @ b_CD).to(dtype)
    return product_VD if total_VD is None else total_VD.add_(product_VD)


def _rows(
    targets_C: torch.Tensor, weight_VD: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of `weight_VD` of each target, and whether this rank holds it."""
    if shard is None:
        # No clamp from above: a target beyond the vocabulary must fail and not count as another.
        return targets_C[:, None].clamp_min(0), (targets_C >= 0)[:, None]
    rows_C1 = targets_C[:, None] - shard.first
    is_mine_C1 = (rows_C1 >= 0) & (rows_C1 < weight_VD.shape[0])
    return rows_C1.clamp(0, weight_VD.shape[0] - 1), is_mine_C1


def _picked(
    logits_CV: torch.Tensor,
    rows_C1: torch.Tensor,
    is_mine_C1: torch.Tensor,
    shard: VocabularyShard | None,
) -> torch.Tensor:
    """Return each target's logit."""
    picked_C1 = logits_CV.gather(1, rows_C1) * is_mine_C1
    return picked_C1 if shard is None else shard.sum_(picked_C1)


def _log_sum_exp(logits_CV: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    if shard is None:
        return logits_CV.logsumexp(dim=-1, keepdim=True)
    greatest_C1 = shard.max_(logits_CV.amax(dim=-1, keepdim=True))
    return shard.sum_((logits_CV - greatest_C1).exp().sum(-1, keepdim=True)).log() + greatest_C1


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or a wider input dtype."""
    return torch.promote_types(dtype, torch.float32)
