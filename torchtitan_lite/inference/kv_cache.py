"""Keys and values of the positions that a model has read, kept so that each is computed once.

They take the place of the attention's own kernel, as those of context parallelism do, so the model
knows nothing of it. Layer: above nn.

Invariant: the slot of a key is its position. A query sees the slots up to its own position, all of
which hold what stands there: prompts of different lengths are filled up at their ends, and what
lies behind an end is written over before a query sees it. So a sequence gives what it gives alone.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.nn.attention import Attention, AttentionMask


class KeyValueCache:
    """The caches of all the layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        """Put kernels that keep keys and values in the place of the model's own; it then reads
        plain sequences, by their positions. Raises ConfigError where it has no `Attention`."""
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

    def make_room(self, batch_size: int, length: int) -> None:
        """Memory for `batch_size` sequences of up to `length` positions; what was kept is gone."""
        for kernel in self._kernels:
            kernel.make_room(batch_size, length)

    @property
    def num_bytes(self) -> int:
        """What this rank's caches take."""
        return sum(kernel.num_bytes for kernel in self._kernels)


@dataclass(frozen=True)
class _Places:
    """Where the keys of a forward pass go, and what its queries see."""

    rows_B1: torch.Tensor
    positions_BS: torch.Tensor
    end: int
    """Slots from here on hold nothing that a query sees."""
    mask_B1SP: torch.Tensor
    """bool, over the slots before `end`."""


class _PositionMask(nn.Module):
    """In the place of the model's mask."""

    def forward(self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None) -> _Places:
        # The host waits here for the device, which has nothing else to do before the next token.
        end = int(positions_BS.max()) + 1
        slots_P = torch.arange(end, device=positions_BS.device)
        mask_BSP = slots_P <= positions_BS[..., None]
        rows_B1 = torch.arange(len(positions_BS), device=positions_BS.device)[:, None]
        return _Places(rows_B1, positions_BS, end, mask_BSP[:, None])


class _CachedKernel(nn.Module):
    """Attention of new positions over those and the kept ones."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        weight = attention.wk.weight
        # Of this rank, where tensor parallelism has cut the heads.
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        self._head_dim = attention.head_dim
        self._num_heads = own.shape[0] // attention.head_dim
        self._dtype, self._device = own.dtype, own.device
        self._keys_BKPE = self._values_BKPE = own.new_empty(0)

    @property
    def num_bytes(self) -> int:
        return self._keys_BKPE.nbytes + self._values_BKPE.nbytes

    def make_room(self, batch_size: int, length: int) -> None:
        # What was there is given back before more is asked for.
        self._keys_BKPE = self._values_BKPE = torch.empty(0)
        shape = (batch_size, self._num_heads, length, self._head_dim)
        # Zeros: memory of any content might hold NaN, which no mask takes out of a product.
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
