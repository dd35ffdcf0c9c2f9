"""Code that computes in float32 by itself, in float64: transformers' norms, softmax and rotations,
and the angles of RoPE here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def in_float64() -> Iterator[None]:
    """Replace float32 in the arguments of torch's functions by float64, and as the default."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class _Widened(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        given = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **given)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
