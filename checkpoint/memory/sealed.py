"""Bytes with their checksum behind them. Layer: imports nothing of the project."""

import struct

import xxhash

_CHECKSUM = struct.Struct("<Q")
CHECKSUM_BYTES = _CHECKSUM.size


def sealed(content: bytes) -> bytes:
    """`content` and its checksum. Zeros are not sealed: fresh memory counts as empty."""
    return content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))


def unsealed(content: memoryview) -> bytes | None:
    """What was sealed; None where the checksum does not hold."""
    fields = bytes(content[: -_CHECKSUM.size])
    (checksum,) = _CHECKSUM.unpack(content[-_CHECKSUM.size :])
    return fields if xxhash.xxh3_64_intdigest(fields) == checksum else None
