"""What ranks tell each other in words and numbers. Layer: imports torch only."""

import torch
import torch.distributed as dist


def gather_texts(text: bytes) -> list[bytes]:
    """What each rank says, by rank. They speak one after the other, since few ranks have much to
    say, over the CPU, where a device's backend has gloo beside it. Every rank must call it."""
    lengths = gather_numbers(len(text))
    return [_told(text, rank, length) for rank, length in enumerate(lengths)]


def gather_numbers(number: int) -> list[int]:
    """What each rank says, by rank, below 2**63. Every rank must call it."""
    numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    numbers[dist.get_rank()] = number
    dist.all_reduce(numbers)
    return numbers.tolist()


def leader_says(text: bytes) -> bytes:
    """What rank 0 says, on every rank. Every rank must call it."""
    length = torch.tensor([len(text)])
    dist.broadcast(length, src=0)
    return _told(text, 0, int(length.item()))


def _told(text: bytes, rank: int, length: int) -> bytes:
    if length == 0:
        return b""
    told = torch.zeros(length, dtype=torch.uint8)
    if rank == dist.get_rank():
        told.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(told, src=rank)
    return told.numpy().tobytes()
