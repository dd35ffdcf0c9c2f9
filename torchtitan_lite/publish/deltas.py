"""Deltas: the elements of a shard that differ from those of an earlier version, by position and
value.

Values are compared and stored as raw bits, so the earlier shard and its delta give exactly the
later one. A delta is, for each block of 65,536 elements, the number of those that differ (4 bytes),
then their values, then their positions within the blocks (2 bytes each).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from torchtitan_lite.errors import PublishError
from torchtitan_lite.redistribute.program import RAW_DTYPES

MAX_SHARE = 0.5
"""Maximum bytes of a delta, as a share of those of the shard."""
_BLOCK = 1 << 16
_COUNT, _POSITION = np.dtype("<u4"), np.dtype("<u2")
_CHUNK = 64 * _BLOCK
"""Elements that are compared at the same time, which bounds memory."""


def encode_delta(old: memoryview, new: memoryview, itemsize: int) -> bytes | None:
    """Return the delta from `old` to `new`, both shards of elements of `itemsize` bytes; None if it
    is larger than `MAX_SHARE`."""
    before, after = _raw(old, itemsize), _raw(new, itemsize)
    left = int(MAX_SHARE * len(new)) - _COUNT.itemsize * _num_blocks(len(after))
    counts, values, positions = [], [], []
    for first in range(0, len(after), _CHUNK):
        chunk = after[first : first + _CHUNK]
        found = np.flatnonzero(before[first : first + _CHUNK] != chunk)
        left -= len(found) * (itemsize + _POSITION.itemsize)
        if left < 0:
            return None
        counts.append(np.bincount(found // _BLOCK, minlength=_num_blocks(len(chunk))))
        values.append(chunk[found])
        positions.append(found % _BLOCK)
    parts = [
        np.concatenate(counts).astype(_COUNT),
        np.concatenate(values),
        np.concatenate(positions).astype(_POSITION),
    ]
    return b"".join(part.tobytes() for part in parts)


@dataclass(frozen=True, kw_only=True)
class ChangedElements:
    """Elements of a tensor, and their new values."""

    indices: tuple[torch.Tensor, ...]
    """Index of each element, per dim."""
    values: torch.Tensor

    def copy_to(self, tensor: torch.Tensor) -> None:
        """Set the elements of `tensor`, in its dtype and on its device."""
        # As integers: torch does not set single elements of all dtypes.
        raw = RAW_DTYPES[tensor.dtype.itemsize]
        indices = tuple(index.to(tensor.device) for index in self.indices)
        values = self.values.to(tensor.device, tensor.dtype)
        tensor.view(raw).index_put_(indices, values.view(raw))


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A decoded delta."""

    shape: tuple[int, ...]
    """Shape of the shard."""
    positions: NDArray[np.int64]
    """Positions in the flat shard, which increase."""
    values: torch.Tensor
    num_bytes: int

    @classmethod
    def decode(cls, raw: memoryview, shape: Sequence[int], dtype: torch.dtype) -> Self:
        """Raises PublishError if `raw` is not a delta of such a shard."""
        num_elements, itemsize = prod(shape), dtype.itemsize
        num_blocks = _num_blocks(num_elements)
        start = num_blocks * _COUNT.itemsize
        count, rest = divmod(len(raw) - start, itemsize + _POSITION.itemsize)
        if count < 0 or rest:
            raise PublishError(f"A delta of {len(raw)} bytes does not fit shape {list(shape)}.")
        counts = np.frombuffer(raw[:start], _COUNT)
        # A copy, which is aligned.
        values = _raw(raw[start : start + count * itemsize], itemsize).copy()
        offsets = np.frombuffer(raw[start + count * itemsize :], _POSITION)
        if int(counts.sum(dtype=np.int64)) != count:
            raise PublishError(f"A delta has {count} elements and counts {int(counts.sum())}.")
        blocks = np.repeat(np.arange(num_blocks, dtype=np.int64) * _BLOCK, counts)
        positions = blocks + offsets
        if count and (positions[-1] >= num_elements or (np.diff(positions) <= 0).any()):
            raise PublishError(f"The positions of a delta do not fit shape {list(shape)}.")
        return cls(
            shape=tuple(shape),
            positions=positions,
            values=torch.from_numpy(values).view(dtype),
            num_bytes=len(raw),
        )

    def within(self, block: Sequence[slice]) -> ChangedElements:
        """Return the elements of a block of the shard, with indices in the block."""
        stride = prod(self.shape[1:])
        first, stop = np.searchsorted(
            self.positions, [block[0].start * stride, block[0].stop * stride]
        )
        indices = np.unravel_index(self.positions[first:stop], self.shape)
        inside = np.ones(stop - first, dtype=bool)
        for index, part in zip(indices[1:], block[1:], strict=True):
            inside &= (part.start <= index) & (index < part.stop)
        return ChangedElements(
            indices=tuple(
                torch.from_numpy(index[inside] - part.start)
                for index, part in zip(indices, block, strict=True)
            ),
            values=self.values[first:stop][torch.from_numpy(inside)],
        )


def _raw(data: memoryview, itemsize: int) -> NDArray[Any]:
    return np.frombuffer(data, np.dtype(f"<u{itemsize}"))


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // _BLOCK)
