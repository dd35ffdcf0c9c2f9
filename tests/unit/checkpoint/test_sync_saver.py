"""The leader of a joint save waits for the parts of the others; tokens of save attempts."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from tests.harness.threads import AwaitedWork
from tests.unit.checkpoint.conftest import Manage, SmallState
from torchtitan_lite.checkpoint import sync_saver
from torchtitan_lite.checkpoint.background.save import WriterGroup, attempt_token
from torchtitan_lite.checkpoint.save_context import AttemptTokens
from torchtitan_lite.checkpoint.storage import attempts
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.mesh import Mesh


def _waits_longer(_: float) -> NoReturn:
    raise AssertionError("it waits longer")


@pytest.mark.parametrize(
    ("patience_s", "fails", "message"),
    [(60, True, "writer 1: no space"), (0, False, r"writers \[1\] did not write their parts")],
)
def test_the_leader_does_not_wait_for_a_part_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, fails: bool, message: str
) -> None:
    monkeypatch.setattr(sync_saver, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(sync_saver.time, "sleep", _waits_longer)
    storage = open_storage(str(tmp_path))
    storage.write(7, "ab", "", [], [])
    attempts.put_part(storage, 7, "ab", 0, {})
    if fails:
        attempts.put_failure(storage, 7, "ab", 1, "no space")
    about: Any = SimpleNamespace(world_size=2)
    with pytest.raises(CheckpointError, match=message):
        sync_saver._wait_for_parts(storage, about, 7, "ab")


def test_each_attempt_has_a_token_of_the_group_or_else_of_the_generation() -> None:
    tokens, group = AttemptTokens("5e55"), WriterGroup(1, 2, "ab12")
    for number in (1, 2):
        assert tokens.next(WriterGroup(), 7) == attempt_token("5e55", 7, number)
        assert tokens.next(group, 7) == attempt_token("ab12", 7, number)
    assert tokens.next(group, 8) == attempt_token("ab12", 8, 1)


def test_a_save_waits_between_two_exchanges(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, saver = AwaitedWork(), manage(SmallState())._synchronous
    reduce: Callable[[list[float]], list[float]] = mesh.all_reduce_numbers

    def counted(numbers: list[float]) -> list[float]:
        work.exchange()
        return reduce(numbers)

    monkeypatch.setattr(sync_saver, "wait", work.wait)
    monkeypatch.setattr(type(mesh), "all_reduce_numbers", lambda self, numbers: counted(numbers))
    assert saver._together(lambda: cast("None", work.run())) == (False, None)
    assert work.num_exchanges == 1
