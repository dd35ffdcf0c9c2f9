"""Dimensions of small models for tests."""

from typing import Any

from torchtitan_lite.models.llama3 import Llama3Dims
from torchtitan_lite.models.qwen3 import Qwen3Dims

_SIZES = ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_dim", "vocab_size")


def qwen3_like(dims: Llama3Dims, **changes: Any) -> Qwen3Dims:
    """Dimensions of a Qwen3 with the sizes of a Llama, except for `changes`."""
    return Qwen3Dims(**{name: getattr(dims, name) for name in _SIZES} | changes)
