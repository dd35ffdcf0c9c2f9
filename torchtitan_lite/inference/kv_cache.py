"""KV cache: keys and values of past positions, each computed once.

Cached attention replaces the kernels of the model's attention modules, as context parallelism does,
so the model is unchanged. Layer: above nn.

Invariant: the slot of a key is its position. A query attends to the slots up to its own position,
all of which hold valid keys: prompts of different lengths are padded at their ends, and padding is
overwritten before a query attends to it. So the output of a sequence does not depend on the others.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.nn.attention import Attention, AttentionMask
from torchtitan_lite.torch_compat import local_tensor


class KeyValueCache:
    """The caches of all layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        """Replace the model's attention kernels by cached ones; the model then takes plain
        sequences, by their positions. Raises ConfigError if it has no `Attention`."""
        self._kernels: list[_CachedKernel] = []
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, AttentionMask):
                    setattr(module, name, _PositionMask())
            if isinstance(module, Attention):
                kernel = _CachedKernel(module)
                module.kernel = kernel
                self._kernels.append(kernel)
        if not self._kernels:
            raise ConfigError(
                f"{type(model).__name__} has no Attention of nn/attention.py, whose keys and "
                "values could be kept. Build its blocks with that module."
            )

    def allocate(self, batch_size: int, length: int) -> None:
        """Allocate memory for `batch_size` sequences of up to `length` positions; earlier contents
        are discarded."""
        for kernel in self._kernels:
            kernel.allocate(batch_size, length)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's caches."""
        return sum(kernel.num_bytes for kernel in self._kernels)


@dataclass(frozen=True)
class _Places:
    """Slots of the keys of a forward pass, and the mask of its queries."""

    rows_B1: torch.Tensor
    positions_BS: torch.Tensor
    end: int
    """Slots from here on are masked for every query."""
    mask_B1SP: torch.Tensor
    """bool, over the slots before `end`."""


class _PositionMask(nn.Module):
    """Replaces the model's mask."""

    def forward(self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None) -> _Places:
        # The host waits for the device, which has no other work before the next token.
        end = int(positions_BS.max()) + 1
        slots_P = torch.arange(end, device=positions_BS.device)
        mask_BSP = slots_P <= positions_BS[..., None]
        rows_B1 = torch.arange(len(positions_BS), device=positions_BS.device)[:, None]
        return _Places(rows_B1, positions_BS, end, mask_BSP[:, None])


class _CachedKernel(nn.Module):
    """Attention of new positions to themselves and the cached ones."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        weight = attention.wk.weight
        # This rank's heads under tensor parallelism.
        own = local_tensor(weight)
        self._head_dim = attention.head_dim
        self._num_heads = own.shape[0] // attention.head_dim
        self._dtype, self._device = own.dtype, own.device
        self._keys_BKPE = self._values_BKPE = own.new_empty(0)

    @property
    def num_bytes(self) -> int:
        return self._keys_BKPE.nbytes + self._values_BKPE.nbytes

    def allocate(self, batch_size: int, length: int) -> None:
        # Free the old memory before allocating more.
        self._keys_BKPE = self._values_BKPE = torch.empty(0)
        shape = (batch_size, self._num_heads, length, self._head_dim)
        # Zeros, because uninitialized memory may hold NaN, which masks do not remove.
        self._keys_BKPE = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._values_BKPE = torch.zeros_like(self._keys_BKPE)

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, places: _Places
    ) -> torch.Tensor:
        self._keep(self._keys_BKPE, k_BKSE, places)
        self._keep(self._values_BKPE, v_BKSE, places)
        return F.scaled_dot_product_attention(
            q_BHSE,
            self._keys_BKPE[:, :, : places.end],
            self._values_BKPE[:, :, : places.end],
            attn_mask=places.mask_B1SP,
            enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1],
        )

    @staticmethod
    def _keep(cache_BKPE: torch.Tensor, new_BKSE: torch.Tensor, places: _Places) -> None:
        cache_BKPE.transpose(1, 2)[places.rows_B1, places.positions_BS] = new_BKSE.transpose(1, 2)
