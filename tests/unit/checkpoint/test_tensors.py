"""Tensors on the memory of bytes."""

import struct

import pytest
import torch

from torchtitan_lite.checkpoint.tensors import tensor_from_bytes

_VALUES = (1.0, 2.0, 3.0)
_RAW = struct.pack("3f", *_VALUES)


@pytest.mark.parametrize("raw", [_RAW, memoryview(_RAW)], ids=["bytes", "read-only view"])
def test_read_only_memory_is_copied_without_a_warning(raw: bytes | memoryview) -> None:
    tensor = tensor_from_bytes(raw, torch.float32, (3,))
    tensor[0] = 7.0
    assert struct.unpack("3f", raw) == _VALUES
    assert tensor.tolist() == [7.0, 2.0, 3.0]


def test_writable_memory_is_shared() -> None:
    memory = bytearray(_RAW)
    tensor = tensor_from_bytes(memoryview(memory), torch.float32, (3,))
    tensor[0] = 7.0
    assert struct.unpack("3f", memory) == (7.0, 2.0, 3.0)


def test_unaligned_elements_are_copied() -> None:
    memory = bytearray(8 + len(_RAW))
    start = 1 + -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 4
    memory[start : start + len(_RAW)] = _RAW
    tensor = tensor_from_bytes(memoryview(memory)[start : start + len(_RAW)], torch.float32, (3,))
    memory[start : start + len(_RAW)] = bytes(len(_RAW))
    assert tensor.tolist() == list(_VALUES)
