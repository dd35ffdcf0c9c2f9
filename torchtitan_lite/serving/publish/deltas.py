"""Deltas: the elements of a shard that differ from those of the version before, by position and
value.

Values are compared, stored and set as raw bits, so the earlier shard and its delta give exactly the
later one. A delta consists of three little-endian arrays: the number of elements that differ in
each block of 65,536 (uint32), their values, and their positions in their blocks (uint16).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from torchtitan_lite.checkpoint import DTYPES
from torchtitan_lite.checkpoint.shared_memory import HeldTensor
from torchtitan_lite.core.errors import PublishError
from torchtitan_lite.distributed.redistribute.execution.program import RAW_DTYPES

_MAX_SHARE = 0.5
"""Maximum bytes of a delta, as a share of those of the shard."""
_BLOCK = 1 << 16
_COUNT, _POSITION = np.dtype("<u4"), np.dtype("<u2")
_BLOCKS_AT_ONCE = 16
"""Blocks that are compared or copied at the same time, which bounds memory: 1 M elements."""


def encode_delta(old: memoryview, new: memoryview, itemsize: int) -> bytes | None:
    """Return the delta from `old` to `new`, both shards of elements of `itemsize` bytes; None if it
    exceeds half of the shard."""
    before, after = _raw(old, itemsize), _raw(new, itemsize)
    budget = int(_MAX_SHARE * len(new)) - _COUNT.itemsize * _num_blocks(len(after))
    counts: list[bytes] = []
    values: list[bytes] = []
    positions: list[bytes] = []
    for first in range(0, len(after), _BLOCKS_AT_ONCE * _BLOCK):
        chunk = after[first : first + _BLOCKS_AT_ONCE * _BLOCK]
        changed = np.flatnonzero(before[first : first + len(chunk)] != chunk)
        budget -= len(changed) * (itemsize + _POSITION.itemsize)
        if budget < 0:
            return None
        per_block = np.bincount(changed // _BLOCK, minlength=_num_blocks(len(chunk)))
        counts.append(per_block.astype(_COUNT).tobytes())
        values.append(chunk[changed].tobytes())
        positions.append((changed % _BLOCK).astype(_POSITION).tobytes())
    return b"".join([*counts, *values, *positions])


class Delta:
    """A received delta of a shard."""

    def __init__(self, raw: memoryview, shape: Sequence[int], dtype: torch.dtype) -> None:
        """`shape` and `dtype` are those of the shard. Raises PublishError if `raw` is not a delta
        of such a shard."""
        self._shape, self._dtype = tuple(shape), dtype
        num_elements = prod(shape)
        num_blocks, width = _num_blocks(num_elements), dtype.itemsize + _POSITION.itemsize
        start = num_blocks * _COUNT.itemsize
        count, rest = divmod(len(raw) - start, width)
        # Shards without dims, of one element, have none.
        if not shape or not num_blocks or count < 0 or rest:
            raise PublishError(f"{len(raw)} bytes are no delta of shape {list(shape)}.")
        stop = start + count * dtype.itemsize
        self._counts = np.frombuffer(raw[:start], _COUNT)
        self._values = _raw(raw[start:stop], dtype.itemsize)
        self._positions = np.frombuffer(raw[stop:], _POSITION)
        self._starts = np.concatenate([[0], np.cumsum(self._counts, dtype=np.int64)])
        if self._starts[-1] != count:
            raise PublishError(f"It has {count} elements, and counts {self._starts[-1]}.")
        increases = self._positions[1:] > self._positions[:-1]
        # From one block to the next, they need not.
        increases[self._starts[(self._starts > 0) & (self._starts < count)] - 1] = True
        last = self._positions[self._starts[-2] :]
        fits = len(last) == 0 or int(last[-1]) < num_elements - (num_blocks - 1) * _BLOCK
        if not (fits and increases.all()):
            raise PublishError(f"Its positions do not increase, or exceed shape {list(shape)}.")

    def apply_to(self, tensor: torch.Tensor, block: Sequence[slice]) -> None:
        """Set the elements that differ in `tensor`, which holds this `block` of the shard, in any
        dtype, on any device and with any strides."""
        # Integers, because torch does not set single elements of all dtypes.
        raw = RAW_DTYPES.get(tensor.dtype.itemsize, tensor.dtype)
        target = tensor.view(raw)
        stride = prod(self._shape[1:])
        first, stop = block[0].start * stride, block[0].stop * stride
        whole = [slice(0, dim) for dim in self._shape[1:]]
        is_flat = list(block[1:]) == whole and tensor.is_contiguous()
        if is_flat:
            target = target.view(-1)
        for positions, values in self._elements_between(first, stop):
            if is_flat:
                indices = (positions - first,)
            else:
                indices, inside = _in_block(positions, self._shape, block)
                values = values[inside]
            target.index_put_(
                tuple(torch.from_numpy(index).to(tensor.device) for index in indices),
                # A copy, because those of a buffer may be unaligned.
                torch.from_numpy(values.copy())
                .view(self._dtype)
                .to(tensor.device, tensor.dtype)
                .view(raw),
            )

    def _elements_between(
        self, first: int, stop: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Yield positions in the flat shard from `first` to `stop`, and their values, some at a
        time."""
        for block in range(first // _BLOCK, _num_blocks(stop), _BLOCKS_AT_ONCE):
            blocks = np.arange(block, min(block + _BLOCKS_AT_ONCE, _num_blocks(stop)))
            part = slice(self._starts[blocks[0]], self._starts[blocks[-1] + 1])
            positions = np.repeat(blocks * _BLOCK, self._counts[blocks]) + self._positions[part]
            begin, end = np.searchsorted(positions, [first, stop])
            if begin < end:
                yield positions[begin:end], self._values[part][begin:end]


class DeltaLink(NamedTuple):
    """A delta of a shard among the bytes that a server offers, and where it leads from."""

    base: str
    """Checksum of the shard to which it applies."""
    offset: int
    num_bytes: int

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Parse JSON values. Raises PublishError."""
        if (
            isinstance(values, list)
            and len(values) == 3
            and isinstance(values[0], str)
            and all(type(number) is int and number >= 0 for number in values[1:])
        ):
            return cls(*values)
        raise PublishError(f"{values!r} does not describe a delta.")


def chain_from(digest: str, links: Iterable[DeltaLink]) -> list[DeltaLink]:
    """Return the deltas, oldest first, that lead from the shard with this checksum to the newest
    one, of `links`, newest first; none if they lead from others only."""
    chain: list[DeltaLink] = []
    for link in links:
        chain.append(link)
        if link.base == digest:
            return chain[::-1]
    return []


class DeltaHistory:
    """Deltas of the last versions. Applied in order, they turn an older version into the newest
    one."""

    def __init__(self, num_versions: int) -> None:
        self._versions: deque[_VersionDeltas] = deque(maxlen=num_versions)
        """Newest first."""

    def add(
        self,
        held: Iterable[HeldTensor],
        old: memoryview,
        new: memoryview,
        old_digests: Mapping[str, str],
        new_digests: Mapping[str, str],
    ) -> None:
        """Add the deltas from one version to the next: the slots that hold their shards, and the
        checksums of these."""
        links: dict[str, _VersionLink] = {}
        encoded: list[bytes] = []
        start = 0
        for shard in held:
            base, digest = old_digests[shard.name], new_digests[shard.name]
            if base == digest or not shard.local_shape:
                continue
            part = slice(shard.offset, shard.offset + shard.bytes)
            delta = encode_delta(old[part], new[part], DTYPES[shard.dtype].itemsize)
            if delta is not None:
                links[shard.name] = _VersionLink(digest, DeltaLink(base, start, len(delta)))
                encoded.append(delta)
                start += len(delta)
        self._versions.appendleft(_VersionDeltas(links, b"".join(encoded)))

    def encoded(self) -> list[bytes]:
        """Return the deltas of each version, newest first."""
        return [version.encoded for version in self._versions]

    def chains(self, digests: Mapping[str, str], offset: int) -> dict[str, list[DeltaLink]]:
        """Return the deltas that lead to shards with these checksums, by name and newest first, if
        `encoded` begins at `offset`."""
        chains: dict[str, list[DeltaLink]] = {}
        for version in self._versions:
            for name, (digest, link) in version.links.items():
                chain = chains.setdefault(name, [])
                # Otherwise a version in between has changed too much for a delta.
                if digest == (chain[-1].base if chain else digests[name]):
                    chain.append(link._replace(offset=offset + link.offset))
            offset += len(version.encoded)
        return {name: chain for name, chain in chains.items() if chain}


class _VersionLink(NamedTuple):
    digest: str
    """Checksum of the shard to which it leads."""
    link: DeltaLink
    """Its offset is that in the deltas of its version."""


class _VersionDeltas(NamedTuple):
    links: dict[str, _VersionLink]
    """Links by name of the shard."""
    encoded: bytes


def _in_block(
    positions: NDArray[np.int64], shape: Sequence[int], block: Sequence[slice]
) -> tuple[tuple[NDArray[np.int64], ...], NDArray[np.bool_]]:
    """Return the indices in a block, per dim, of those positions in the flat shard that are in it,
    and which these are. Their index in dim 0 must be in the block."""
    indices = np.unravel_index(positions, shape)
    inside = np.ones(len(positions), dtype=bool)
    for index, part in zip(indices[1:], block[1:], strict=True):
        inside &= (part.start <= index) & (index < part.stop)
    moved = (index[inside] - part.start for index, part in zip(indices, block, strict=True))
    return tuple(moved), inside


def _raw(data: memoryview, itemsize: int) -> NDArray[Any]:
    return np.frombuffer(data, np.dtype(f"<u{itemsize}"))


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // _BLOCK)
