"""Work beside which the ranks exchange their states."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest

from tests.unit.checkpoint.conftest import Manage, SmallState
from torchtitan_lite.checkpoint import collective, sync_saver
from torchtitan_lite.checkpoint.collective import run_long_on_all_ranks
from torchtitan_lite.distributed.mesh import Mesh


class _Work:
    """Work that goes on until a rank waits for it."""

    def __init__(self) -> None:
        self.num_exchanges = 0
        self._go_on = threading.Event()

    def run(self) -> int:
        assert self._go_on.wait(30)
        return 7

    def wait(self, futures: list["Future[Any]"], timeout: float) -> None:
        assert timeout > 0
        self._go_on.set()
        futures[0].exception()

    def exchange(self) -> None:
        self.num_exchanges += 1
        if self.num_exchanges == 10:
            self._go_on.set()


def test_a_rank_waits_between_two_exchanges(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that ends at once costs one exchange."""
    work, gather = _Work(), collective.all_gather_ints

    def counted(state: int) -> list[int]:
        work.exchange()
        return gather(state)

    monkeypatch.setattr(collective, "wait", work.wait)
    monkeypatch.setattr(collective, "all_gather_ints", counted)
    assert run_long_on_all_ranks(lambda tick: work.run()) == 7
    assert work.num_exchanges == 1


def test_a_save_waits_between_two_exchanges(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, saver = _Work(), manage(SmallState())._synchronous
    reduce: Callable[[list[float]], list[float]] = mesh.all_reduce_numbers

    def counted(numbers: list[float]) -> list[float]:
        work.exchange()
        return reduce(numbers)

    monkeypatch.setattr(sync_saver, "wait", work.wait)
    monkeypatch.setattr(type(mesh), "all_reduce_numbers", lambda self, numbers: counted(numbers))
    assert saver._together(lambda: cast("None", work.run())) == (False, None)
    assert work.num_exchanges == 1
