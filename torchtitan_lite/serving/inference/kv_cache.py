"""KV cache: the states of past positions, each computed once. They are what the kind of attention
says that they are: keys and values, or latents. A recurrence has one state for all of them, and the
last inputs of its convolution.

The cache replaces the exchange of the model's attention modules and the carry of its recurrences,
as context parallelism does, so the model is unchanged.

Invariant: the slot of a state is its position. A query attends to slots up to its own position, all
of which hold valid states: prompts of different lengths are padded at their ends, and padding is
overwritten before a query attends to it. Recurrences skip padding (`set_valid_counts`), because it
would remain in their state. So the output of a sequence does not depend on the others.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.attention import (
    Attention,
    AttentionMask,
    BlockContext,
    MaskKind,
    States,
)
from torchtitan_lite.nn.recurrent import AffineMap, Carry, Recurrence


class KeyValueCache:
    """The caches of all layers of a model."""

    def __init__(self, model: nn.Module) -> None:
        """Give each attention of the model a cache, until `detach`; the model then takes plain
        sequences, by their positions. Raises ConfigError if it has no `Attention` or
        `Recurrence`."""
        self._layers: list[_CachedStates | _CachedCarry] = []
        self._restore = ExitStack()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, AttentionMask):
                    self._replace(module, name, _PositionMask(child.kind))
            if isinstance(module, Attention):
                cached = _CachedStates(module)
                self._replace(module, "exchange", cached)
                self._replace(module, "is_cached", True)
                # The masks are tensors, whatever kernel the model is trained with.
                self._replace(module, "kernel", module.make_kernel("sdpa"))
                self._layers.append(cached)
            elif isinstance(module, Recurrence):
                carry = _CachedCarry(module)
                self._replace(module, "carry", carry)
                self._layers.append(carry)
        if not self._layers:
            raise ConfigError(
                f"{type(model).__name__} has no Attention of nn/attention.py, whose states could "
                "be kept. Derive the attention of its blocks from that class."
            )

    def detach(self) -> None:
        """Give the model back the parts that the caches replaced."""
        self._restore.close()

    def _replace(self, module: nn.Module, name: str, part: Any) -> None:
        self._restore.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, part)

    def allocate(self, batch_size: int, length: int) -> None:
        """Allocate memory for `batch_size` sequences of up to `length` positions; earlier contents
        are discarded."""
        for layer in self._layers:
            layer.allocate(batch_size, length)

    def set_valid_counts(self, counts_B: torch.Tensor | None) -> None:
        """Set how many positions of each sequence the next forward has before its padding; None:
        it has no padding."""
        for layer in self._layers:
            if isinstance(layer, _CachedCarry):
                layer.counts_B = counts_B

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's caches."""
        return sum(layer.num_bytes for layer in self._layers)


class _PositionMask(nn.Module):
    """Replaces a mask of the model."""

    def __init__(self, kind: MaskKind) -> None:
        super().__init__()
        self._kind = kind

    def forward(
        self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [B, 1, S, P], bool: which of the first P slots each query attends to. All others
        are masked for every query."""
        # The host waits for the device, which has no other work before the next token.
        slots_P = torch.arange(int(positions_BS.max()) + 1, device=positions_BS.device)
        return self._kind.sees(positions_BS[..., None], slots_P)[:, None]


class _CachedStates:
    """The states of new positions and the cached ones."""

    def __init__(self, attention: Attention) -> None:
        # This rank's part under tensor parallelism.
        own = local_tensor(next(attention.parameters()))
        self._shapes = attention.state_shapes()
        self._dtype, self._device = own.dtype, own.device
        self._caches: States = ()

    @property
    def num_bytes(self) -> int:
        return sum(cache.nbytes for cache in self._caches)

    def allocate(self, batch_size: int, length: int) -> None:
        # Free the old memory before allocating more.
        self._caches = ()
        # Zeros, because uninitialized memory may hold NaN, which masks do not remove.
        self._caches = tuple(
            torch.zeros((batch_size, *heads, length, width), dtype=self._dtype, device=self._device)
            for *heads, width in self._shapes
        )

    def __call__(self, states: States, context: BlockContext) -> States:
        positions_BS = context.positions_BS
        rows_B1 = torch.arange(len(positions_BS), device=positions_BS.device)[:, None]
        end = context.mask.shape[-1]
        for cache, new in zip(self._caches, states, strict=True):
            cache.movedim(-2, 1)[rows_B1, positions_BS] = new.movedim(-2, 1)
        return tuple(cache[..., :end, :] for cache in self._caches)


class _CachedCarry(Carry):
    """The state of a recurrence behind all positions so far, and the last inputs of its
    convolution."""

    def __init__(self, recurrence: Recurrence) -> None:
        # This rank's part under tensor parallelism.
        own = local_tensor(next(recurrence.parameters()))
        self._input_shape, self._state_shape = recurrence.input_shape(), recurrence.state_shape()
        self._dtype, self._device = own.dtype, own.device
        self._inputs_BMI = self._state_BHEG = torch.empty(0)
        self.counts_B: torch.Tensor | None = None
        """Positions of each sequence that are not padding; None: all."""

    @property
    def num_bytes(self) -> int:
        return self._inputs_BMI.nbytes + self._state_BHEG.nbytes

    def allocate(self, batch_size: int, length: int) -> None:
        self.counts_B = None

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((batch_size, *shape), dtype=dtype, device=self._device)

        self._inputs_BMI = zeros(self._input_shape, self._dtype)
        # It sums over all positions.
        wide = torch.promote_types(self._dtype, torch.float32)
        self._state_BHEG = zeros(self._state_shape, wide)

    def is_padding(self, num_positions: int) -> torch.Tensor | None:
        if self.counts_B is None:
            return None
        places_S = torch.arange(num_positions, device=self._device)
        return places_S >= self.counts_B[:, None]

    def extend(self, inputs_ZLI: torch.Tensor, num_before: int) -> torch.Tensor:
        extended = torch.cat([self._inputs_BMI, inputs_ZLI], dim=1)
        if self.counts_B is None:
            self._inputs_BMI = extended[:, -num_before:]
            return extended
        places_BM = self.counts_B[:, None] + torch.arange(num_before, device=self._device)
        rows_B1 = torch.arange(len(extended), device=self._device)[:, None]
        self._inputs_BMI = extended[rows_B1, places_BM]
        return extended

    def begin(self, own: AffineMap | None) -> torch.Tensor:
        return self._state_BHEG

    def end(self, state_ZHEG: torch.Tensor) -> None:
        self._state_BHEG = state_ZHEG
