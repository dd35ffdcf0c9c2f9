"""Tensors as arrays of words, and the arithmetic of contributions. Layer: imports torch and numpy.

A word is an integer of 1, 2, 4 or 8 bytes. numpy copies a rectangle in a third of the time that
torch needs to begin with it, and knows no bfloat16 or float8: as words they are all the same.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By width in bytes."""
_NUMPY_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_REDUCE = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}

_WIDE_ELEMENTS = 1 << 16
"""Elements that are reduced in float32 at a time."""

WordArray = Any
"""A numpy array on a CPU, a tensor elsewhere: both are indexed and assigned alike."""


def word_bytes(dtypes: Iterable[torch.dtype]) -> int:
    """The width of the widest word of which an element of any of `dtypes` is a whole number."""
    return min((min(dtype.itemsize, 8) for dtype in dtypes), default=1)


def is_viewed_as_words(tensor: torch.Tensor, width: int) -> bool:
    """Whether a tensor can be seen as words without a copy: an element that is several words must
    have its neighbor of the last dim beside it."""
    return (
        tensor.dtype.itemsize == width
        or tensor.is_contiguous()
        or tensor.stride(-1) == 1
        or tensor.numel() == 0
    )


def word_tensor(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor as words; a scalar as an array of one dim."""
    shape = tensor.shape or (1,)
    strides = _strides(shape) if tensor.is_contiguous() else tensor.stride()
    return tensor.detach().as_strided(shape, strides).view(WORDS[width])


def word_array(tensor: torch.Tensor, width: int) -> WordArray:
    """A tensor as words, in the form in which copies of them begin soonest.

    On a CPU it does not keep the tensor's memory: use it while the tensor lives.
    """
    if tensor.device.type != "cpu":
        return word_tensor(tensor, width)
    ratio = tensor.dtype.itemsize // width
    shape = (*tensor.shape[:-1], tensor.shape[-1] * ratio) if tensor.ndim else (ratio,)
    if 0 in shape:
        return np.empty(shape, _NUMPY_WORDS[width])
    if tensor.is_contiguous():
        memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
        return np.frombuffer(memoryview(memory), _NUMPY_WORDS[width]).reshape(shape)
    last = sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    nbytes = (last + 1) * tensor.dtype.itemsize
    memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    words = np.frombuffer(memoryview(memory), _NUMPY_WORDS[width])
    steps = [stride * tensor.dtype.itemsize for stride in tensor.stride()]
    steps[-1] = width if ratio > 1 else steps[-1]
    return np.lib.stride_tricks.as_strided(words, shape, steps, writeable=False)


def _strides(shape: Sequence[int]) -> list[int]:
    """Of a contiguous array: a dim of one element may have any, and a view as words wants 1."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return strides[::-1]


def word_tensor_of(count: int, width: int, device: torch.device) -> torch.Tensor:
    """Memory for words of `width` bytes, whatever it holds."""
    return torch.empty(count, dtype=WORDS[width], device=device)


def numpy_word(width: int) -> type[np.integer]:
    """numpy's type of a word."""
    return _NUMPY_WORDS[width]


class Reduction(NamedTuple):
    """How contributions become a result."""

    dtype: torch.dtype
    op: str
    factor: float
    """What the result is multiplied by."""

    def apply_(self, into: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
        """Reduce contributions, all given as words of the dtype, into the first. Dtypes of less
        than 32 bits are computed in float32 and rounded once."""
        dtype, reduce, factor = self.dtype, _REDUCE[self.op], self.factor
        into, others = into.view(dtype), [other.view(dtype) for other in others]
        if not dtype.is_floating_point or dtype.itemsize >= 4:
            for other in others:
                reduce(into, other, out=into)
            if factor != 1:
                into.mul_(factor)
            return
        # Part by part on a CPU, so that little memory is needed beside buckets; on a GPU launches
        # would take longer than the work.
        dim = max(range(into.ndim), key=into.shape.__getitem__)
        most = _WIDE_ELEMENTS if into.is_cpu else max(1, into.numel())
        length = max(1, most * into.shape[dim] // max(1, into.numel()))
        split = (tensor.split(length, dim) for tensor in (into, *others))
        for total, *parts in zip(*split, strict=True):
            wide = total.float()
            for part in parts:
                reduce(wide, part.float(), out=wide)
            total.copy_(wide.mul_(factor) if factor != 1 else wide)


def nothing(dtype: torch.dtype, op: str) -> Any:
    """The value that changes nothing when it is joined to others."""
    if op in ("sum", "product"):
        return 0 if op == "sum" else 1
    if dtype == torch.bool:
        return op == "min"
    if not dtype.is_floating_point:
        whole = torch.iinfo(dtype)
        return whole.max if op == "min" else whole.min
    if dtype.itemsize == 1:
        # Not every float8 has an infinity.
        small = torch.finfo(dtype)
        return small.max if op == "min" else small.min
    return float("inf") if op == "min" else float("-inf")
