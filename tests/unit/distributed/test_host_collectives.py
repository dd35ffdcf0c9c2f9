"""Byte strings and integers of several ranks."""

import pytest
import torch.distributed as dist

from tests.harness.threads import run_on_threads
from torchtitan_lite.distributed.host_collectives import (
    all_gather_bytes,
    all_gather_ints,
    broadcast_bytes,
)
from torchtitan_lite.distributed.mesh import Mesh


def test_each_rank_gets_the_integer_of_each_rank() -> None:
    for first in (2**62, -1):
        numbers = run_on_threads(3, lambda number: all_gather_ints(number + dist.get_rank()), first)
        assert numbers == [[first, first + 1, first + 2]] * 3


def test_each_rank_gets_the_byte_string_of_each_rank_whatever_their_lengths() -> None:
    def gather(*texts: bytes) -> list[bytes]:
        return all_gather_bytes(texts[dist.get_rank()])

    for texts in ([b"abc", b"def", b"ghi"], [b"", b"long", b"x"], [b"", b"", b""]):
        assert run_on_threads(3, gather, *texts) == [texts] * 3


def test_each_rank_gets_the_byte_string_of_rank_0() -> None:
    def broadcast(*texts: bytes) -> bytes:
        return broadcast_bytes(texts[dist.get_rank()])

    assert run_on_threads(3, broadcast, b"ab", b"longer", b"") == [b"ab"] * 3
    assert run_on_threads(2, broadcast, b"", b"other") == [b""] * 2


@pytest.mark.parametrize("text", [b"", b"content \x00\xff"])
def test_the_first_rank_keeps_what_it_broadcasts(text: bytes, mesh: Mesh) -> None:
    assert broadcast_bytes(text) == text
