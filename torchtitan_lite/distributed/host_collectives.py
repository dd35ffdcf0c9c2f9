"""Collectives for byte strings and integers."""

import torch
import torch.distributed as dist


def all_gather_bytes(text: bytes) -> list[bytes]:
    """Return the byte string of each rank, by rank. Collective. The ranks broadcast one after the
    other, because few of them have much to send, over the CPU, so that a device's backend needs
    gloo beside it."""
    lengths = all_gather_ints(len(text))
    return [_broadcast(text, rank, length) for rank, length in enumerate(lengths)]


def all_gather_ints(number: int) -> list[int]:
    """Return the integer of each rank, below 2**63, by rank. Collective."""
    numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    numbers[dist.get_rank()] = number
    dist.all_reduce(numbers)
    return numbers.tolist()


def broadcast_bytes(text: bytes) -> bytes:
    """Return rank 0's byte string on every rank. Collective."""
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=0)
    return _broadcast(text, 0, int(length.item()))


def _broadcast(text: bytes, rank: int, length: int) -> bytes:
    if length == 0:
        return b""
    buffer = torch.zeros(length, dtype=torch.uint8)
    if rank == dist.get_rank():
        buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(buffer, src=rank)
    return buffer.numpy().tobytes()
