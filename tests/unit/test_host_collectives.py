"""Byte strings of ranks, on a world of one rank."""

import pytest

from torchtitan_lite.host_collectives import broadcast_bytes
from torchtitan_lite.mesh import Mesh


@pytest.mark.parametrize("text", [b"", b"content \x00\xff"])
def test_the_first_rank_keeps_what_it_broadcasts(text: bytes, mesh: Mesh) -> None:
    assert broadcast_bytes(text) == text
