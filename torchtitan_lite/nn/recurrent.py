"""Recurrences as context parallelism and the KV cache see them.

A recurrence hands a state of fixed size from position to position. Over any consecutive positions
it is an affine map of that state, S -> matrix S + offset, so that pieces of a sequence can be
computed at the same time: each finds its map, the maps are composed in the order of the pieces, and
give the state that each begins with. Beside the state, a short convolution takes over its last
inputs.

Beside the legend in `spec.py`: P consecutive pieces of a sequence Z = B*P pieces of all samples L
positions of a piece I channels of a convolution M earlier inputs that it reads G width of a value
head
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchtitan_lite.nn.attention import TokenMixer

NO_DOCUMENT = -1
"""Document of the positions before a sequence."""


@dataclass(frozen=True)
class AffineMap:
    """What some positions do to the state [Z, H, E, G] that they begin with."""

    matrix_ZHEE: torch.Tensor
    offset_ZHEG: torch.Tensor

    def of(self, state_ZHEG: torch.Tensor) -> torch.Tensor:
        """Return the state behind these positions."""
        return self.offset_ZHEG + self.matrix_ZHEE @ state_ZHEG


class Carry:
    """What a forward takes over from earlier positions, and hands on to later ones: nothing, where
    a rank has entire sequences in one forward. Context parallelism and the KV cache have their
    own."""

    num_pieces = 1
    """Pieces that this rank has of each sequence, one behind the other."""
    needs_map = False
    """Whether `begin` takes the maps of the pieces."""

    def documents(self, documents_BS: torch.Tensor, num_before: int) -> torch.Tensor:
        """Return the documents [Z, num_before + L] of the positions of each piece and of those
        before it; `documents_BS` are those of entire sequences."""
        return F.pad(documents_BS, (num_before, 0), value=NO_DOCUMENT)

    def extend(self, inputs_ZLI: torch.Tensor, num_before: int) -> torch.Tensor:
        """Return [Z, num_before + L, I]: the inputs of each piece behind those of the positions
        before it, which are zeros before a sequence."""
        return F.pad(inputs_ZLI, (0, 0, num_before, 0))

    def is_padding(self, num_positions: int) -> torch.Tensor | None:
        """Return which positions [B, S] leave the state as it is; None: none."""
        return None

    def begin(self, own: AffineMap | None) -> torch.Tensor | None:
        """Return the state [Z, H, E, G] that each piece begins with; None: zeros."""
        return None

    def end(self, state_ZHEG: torch.Tensor) -> None:
        """Take the state behind each piece."""


class Recurrence(TokenMixer):
    """A kind of attention that is a recurrence. Context parallelism and the KV cache replace
    `carry`."""

    carry: Carry

    def __init__(self) -> None:
        super().__init__()
        self.carry = Carry()

    @abstractmethod
    def input_shape(self) -> tuple[int, int]:
        """Return (M, I) of the convolution on this rank."""

    @abstractmethod
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape [H, E, G] of the state on this rank."""
