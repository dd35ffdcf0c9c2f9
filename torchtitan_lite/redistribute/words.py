"""Tensors as arrays of words, and the arithmetic of contributions. Layer: imports torch and numpy.

A word is an integer of 1, 2, 4 or 8 bytes. numpy copies a rectangle in a third of the time that
torch needs to begin with it, and knows no bfloat16 or float8: as words they are all the same.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By width in bytes."""
_NUMPY_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_JOIN = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}

WordArray = Any
"""A numpy array on a CPU, a tensor elsewhere: both are indexed and assigned alike."""


def word_bytes(dtypes: Iterable[torch.dtype]) -> int:
    """The width of the widest word of which an element of any of `dtypes` is a whole number."""
    return min((min(dtype.itemsize, 8) for dtype in dtypes), default=1)


def word_tensor(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """A contiguous tensor as words; a scalar as an array of one dim."""
    shape = tensor.shape or (1,)
    return tensor.detach().as_strided(shape, _strides(shape)).view(WORDS[width])


def word_array(tensor: torch.Tensor, width: int) -> WordArray:
    """A contiguous tensor as words, in the form in which copies of them begin soonest.

    On a CPU it does not keep the tensor's memory: use it while the tensor lives.
    """
    if tensor.device.type != "cpu":
        return word_tensor(tensor, width)
    ratio = tensor.dtype.itemsize // width
    shape = (*tensor.shape[:-1], tensor.shape[-1] * ratio) if tensor.ndim else (ratio,)
    if 0 in shape:
        return np.empty(shape, _NUMPY_WORDS[width])
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), _NUMPY_WORDS[width]).reshape(shape)


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


def join_(into: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, op: str) -> None:
    """Join contributions, both given as words of `dtype`, in place. float8 is computed in
    float32, as torch does not compute in it."""
    into, other = into.view(dtype), other.view(dtype)
    if dtype.itemsize == 1 and dtype.is_floating_point:
        into.copy_(_JOIN[op](into.float(), other.float()))
    else:
        _JOIN[op](into, other, out=into)


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
