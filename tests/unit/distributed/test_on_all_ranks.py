"""Errors and messages of several ranks, and work beside which they exchange their states."""

import pytest
import torch.distributed as dist

from tests.harness.threads import AwaitedWork, run_on_threads
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed import on_all_ranks
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.on_all_ranks import (
    first_message,
    raise_on_all_ranks,
    run_long_on_all_ranks,
)


def test_the_error_of_a_rank_is_raised_on_all() -> None:
    def act() -> str:
        try:
            raise_on_all_ranks(CheckpointError("no space") if dist.get_rank() == 1 else None)
        except CheckpointError as error:
            return str(error)
        return ""

    assert run_on_threads(3, act) == ["no space"] * 3


def test_the_first_message_is_that_of_the_first_rank_with_one() -> None:
    def first(*texts: str) -> str:
        return first_message(texts[dist.get_rank()])

    assert run_on_threads(3, first, "", "b", "c") == ["b"] * 3
    assert run_on_threads(2, first, "", "") == [""] * 2


def test_a_rank_waits_between_two_exchanges(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that ends at once costs one exchange."""
    work, gather = AwaitedWork(), on_all_ranks.all_gather_ints

    def counted(state: int) -> list[int]:
        work.exchange()
        return gather(state)

    monkeypatch.setattr(on_all_ranks, "wait", work.wait)
    monkeypatch.setattr(on_all_ranks, "all_gather_ints", counted)
    assert run_long_on_all_ranks(lambda tick: work.run()) == 7
    assert work.num_exchanges == 1
