"""Tensors as bytes, and bytes as tensors. Layer: imports torch only."""

from collections.abc import Sequence
from math import prod

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's bytes: its memory on the CPU, a copy elsewhere."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.cpu().view(-1).view(torch.uint8).numpy().data


def as_tensor(raw: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Bytes as a tensor on the same memory; a copy where an element would not be aligned, or where
    the memory, which an object store has given, cannot be written to: torch warns of such."""
    if prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = bytearray(raw) if isinstance(raw, bytes) else raw
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if tensor.data_ptr() % dtype.itemsize:
        tensor = tensor.clone()
    return tensor.view(dtype).view(tuple(shape))


def overflows(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a number that was finite is none any more in another dtype (above 65,504 in
    float16)."""
    if after.dtype != torch.float16 or before.dtype == torch.float16:
        return False
    return bool((after.isinf() & ~before.isinf()).any())
