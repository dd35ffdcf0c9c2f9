"""Grouped linear maps: rows sorted by group, each times its group's matrix.

Two implementations: torch's grouped kernel on a GPU, if dtype and strides fit it, and a loop over
the groups for everything else.

Beside the legend in `spec.py`: X experts (groups)   N rows   I, O input and output features of a
matrix
"""

from typing import Any

import torch
import torch.nn.functional as F


def grouped_linear(
    x_NI: torch.Tensor, weight_XOI: torch.Tensor, counts_X: torch.Tensor
) -> torch.Tensor:
    """Multiply rows sorted by expert with their expert's matrix: [N, I] -> [N, O].

    `counts_X` (int64) has the rows per expert; their sum is N.
    """
    if _fits_kernel(x_NI, weight_XOI):
        return kernel_linear(x_NI, weight_XOI, counts_X)
    return looped_linear(x_NI, weight_XOI, counts_X)


def kernel_linear(
    x_NI: torch.Tensor, weight_XOI: torch.Tensor, counts_X: torch.Tensor
) -> torch.Tensor:
    """`grouped_linear` by torch's grouped kernel, without waiting for the device."""
    ends_X = counts_X.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x_NI, weight_XOI.transpose(1, 2), offs=ends_X)


# Opaque operators: the loops depend on counts that neither the compiler nor a fake tensor knows.
@torch.library.custom_op("torchtitan_lite::grouped_linear", mutates_args=())
def looped_linear(
    x_NI: torch.Tensor, weight_XOI: torch.Tensor, counts_X: torch.Tensor
) -> torch.Tensor:
    """`grouped_linear` by one product per non-empty expert, for any device, dtype and strides.
    Waits for the device."""
    out_NO = x_NI.new_empty(len(x_NI), weight_XOI.shape[1])
    for expert, rows in _rows_of_experts(x_NI, counts_X):
        torch.mm(x_NI[rows], weight_XOI[expert].t(), out=out_NO[rows])
    return out_NO


@torch.library.custom_op("torchtitan_lite::grouped_outer", mutates_args=())
def _looped_outer(
    grad_NO: torch.Tensor, x_NI: torch.Tensor, counts_X: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [X, O, I] of the matrices; zero for an expert without rows."""
    grad_XOI = x_NI.new_zeros(len(counts_X), grad_NO.shape[1], x_NI.shape[1])
    for expert, rows in _rows_of_experts(x_NI, counts_X):
        torch.mm(grad_NO[rows].t(), x_NI[rows], out=grad_XOI[expert])
    return grad_XOI


@looped_linear.register_fake
def _(x_NI: torch.Tensor, weight_XOI: torch.Tensor, counts_X: torch.Tensor) -> torch.Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_XOI.shape[1])


@_looped_outer.register_fake
def _(grad_NO: torch.Tensor, x_NI: torch.Tensor, counts_X: torch.Tensor) -> torch.Tensor:
    return x_NI.new_empty(counts_X.shape[0], grad_NO.shape[1], x_NI.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _looped_backward(
    ctx: Any, grad_NO: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x_NI, weight_XOI, counts_X = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    grad_NI = looped_linear(grad_NO, weight_XOI.transpose(1, 2), counts_X) if needs_x else None
    grad_XOI = _looped_outer(grad_NO, x_NI, counts_X) if needs_weight else None
    return grad_NI, grad_XOI, None


looped_linear.register_autograd(_looped_backward, setup_context=_save_for_backward)


def _rows_of_experts(x_NI: torch.Tensor, counts_X: torch.Tensor) -> list[tuple[int, slice]]:
    """Return the non-empty experts with their rows."""
    counts = counts_X.tolist()
    if sum(counts) != len(x_NI):
        raise ValueError(f"The experts' counts add up to {sum(counts)}, for {len(x_NI)} rows.")
    slices, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            slices.append((expert, slice(start, start + count)))
        start += count
    return slices


def _fits_kernel(x_NI: torch.Tensor, weight_XOI: torch.Tensor) -> bool:
    """Whether the grouped kernel supports these: bfloat16 on a GPU, rows aligned to 16 bytes."""
    return (
        x_NI.is_cuda
        and x_NI.dtype == weight_XOI.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x_NI.device) >= (8, 0)
        and x_NI.shape[0] > 0
        and weight_XOI.shape[1] % 8 == 0
        and _is_aligned(x_NI)
        and _is_aligned(weight_XOI)
    )


def _is_aligned(tensor: torch.Tensor) -> bool:
    *strides, last = tensor.stride()
    if last != 1 or any(step % 8 for step in strides):
        return False
    # The compiler cannot trace storage_offset. Its own buffers are aligned, and so are parameters:
    # FSDP2 gathers each into a storage of its own, and a cast returns one.
    return torch.compiler.is_compiling() or tensor.storage_offset() % 8 == 0
