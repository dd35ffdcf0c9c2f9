"""Asynchronous saves as the writer process sees them: what is ordered, and when a step counts."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.checkpoint.conftest import Manage, SmallState
from tests.unit.checkpoint.test_asynchronous import ASYNC, complete, saver_of, steps
from torchtitan_lite.checkpoint import async_setup
from torchtitan_lite.checkpoint.async_saver import AsynchronousSaver
from torchtitan_lite.checkpoint.background.save import WriterGroup
from torchtitan_lite.checkpoint.leftover_snapshots import SnapshotOrigin
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.mesh import Mesh


class RecordedWriter:
    """A writer that records its orders, and responds as the test says."""

    signals_fd = -1
    _process = None

    def __init__(self, *arguments: object) -> None:
        self.orders: list[tuple[Any, ...]] = []
        self.token: str | None = None
        """Token of the last attempt."""
        self.commits_in: int | None = None
        """Calls of `responses` after which the last attempt is committed."""
        self.has_failed = False
        self.alive, self.pid = False, 0

    def start(self) -> None:
        self.alive, self.pid = True, self.pid + 1
        self.orders.append(("start",))

    def save(self, slot: int, step: int, token: str, **options: object) -> None:
        self.token = token
        self.orders.append(("save", step))

    def abandon(self, step: int) -> None:
        self.orders.append(("abandon", step))

    def set_writer_group(self, group: WriterGroup) -> None:
        self.orders.append(("group",))

    def responses(self) -> list[dict[str, Any]]:
        if self.has_failed:
            self.has_failed = False
            return [{"failed": 1, "error": "OSError", "token": self.token}]
        if self.commits_in is None or self.token is None:
            return []
        self.commits_in -= 1
        # So that a test ends that would wait without end.
        assert self.commits_in > -5
        if self.commits_in != 0:
            return []
        self.orders.append(("committed",))
        return [{"committed": 1, "token": self.token}]

    def close(self, *, free: bool) -> None:
        self.orders.append(("close", free))

    def detach(self) -> None:
        self.orders.append(("detach",))


@pytest.fixture(autouse=True)
def recorded_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_setup, "WriterProcess", RecordedWriter)


def started(manage: Manage, mesh: Mesh, **settings: Any) -> tuple[CheckpointManager, SmallState]:
    """Take the first step, which is not saved unless it is due."""
    state = SmallState()
    defaults = ASYNC | {"interval": 100, "enable_first_step_checkpoint": False}
    manager = manage(state, **defaults | settings)
    steps(manager, state, mesh, 1)
    return manager, state


def writer_of(saver: AsynchronousSaver) -> RecordedWriter:
    writer: Any = saver._writer
    return writer


def test_a_step_is_confirmed_once_all_ranks_have_it(manage: Manage, mesh: Mesh) -> None:
    manager, state = started(manage, mesh)
    region = saver_of(manager)._region
    assert region.confirmed == -1
    complete(manager, mesh)
    assert region.confirmed == 1
    steps(manager, state, mesh, 1)
    assert region.confirmed == 1
    complete(manager, mesh)
    assert region.confirmed == 2


def test_a_step_whose_snapshot_failed_is_never_confirmed(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, state = started(manage, mesh)
    complete(manager, mesh)
    saver = saver_of(manager)

    def outgrown(slot: int, values: object) -> None:
        raise ValueError("they need 2 GB")

    monkeypatch.setattr(saver._region, "complete", outgrown)
    steps(manager, state, mesh, 1)
    for _ in range(2):
        complete(manager, mesh)
        assert saver._region.confirmed == 1


def test_after_a_roll_back_no_abandoned_step_is_saved_or_confirmed(
    manage: Manage, mesh: Mesh
) -> None:
    manager, state = started(manage, mesh)
    steps(manager, state, mesh, 2)
    complete(manager, mesh)
    saver = saver_of(manager)
    saver._snapshot(saves=True)
    saver.local_signals(0.0)
    manager.discard_snapshots()
    writer = writer_of(saver)
    assert writer.orders == [("start",), ("save", 3), ("abandon", 3)]
    assert saver._region.confirmed == -1
    complete(manager, mesh)
    assert saver._region.confirmed == -1
    # The next step is in memory whatever the interval, and the save is repeated with it.
    saver._interval.steps = 100
    state.step = 1
    steps(manager, state, mesh, 1)
    complete(manager, mesh)
    assert saver._region.confirmed == 2
    assert writer.orders[3:] == [("save", 2)]


def test_a_resume_from_memory_confirms_its_step(manage: Manage, mesh: Mesh) -> None:
    manager, state = started(manage, mesh)
    steps(manager, state, mesh, 2)
    complete(manager, mesh)
    saver = saver_of(manager)
    assert saver._region.confirmed == 3
    saver.resume_from(SnapshotOrigin(manager._context.identity.generation_id, 2))
    assert saver._region.confirmed == 2
    assert list(saver._region.complete_slots()) == [2]


def test_a_failed_save_is_abandoned_and_repeated(manage: Manage, mesh: Mesh) -> None:
    manager, state = started(manage, mesh, enable_first_step_checkpoint=True)
    complete(manager, mesh)
    writer = writer_of(saver_of(manager))
    writer.has_failed = True
    complete(manager, mesh)
    assert writer.orders == [("start",), ("save", 1), ("abandon", 1)]
    steps(manager, state, mesh, 1)
    complete(manager, mesh)
    assert writer.orders[3:] == [("save", 2)]


def test_a_save_of_another_group_is_abandoned_and_repeated(manage: Manage, mesh: Mesh) -> None:
    manager, _ = started(manage, mesh, enable_first_step_checkpoint=True)
    complete(manager, mesh)
    saver = saver_of(manager)
    group = saver._writer_group
    saver.set_writer_group(replace(group, count=2, token="ab"))
    writer = writer_of(saver)
    assert ("abandon", 1) in writer.orders


def test_the_death_of_a_writer_is_reported_before_it_is_replaced(
    manage: Manage, mesh: Mesh, logged: pytest.LogCaptureFixture
) -> None:
    manager, _ = started(manage, mesh, enable_first_step_checkpoint=True)
    writer_of(saver_of(manager)).alive = False
    complete(manager, mesh)
    assert "the checkpoint writer has died" in logged.text
    assert writer_of(saver_of(manager)).orders == [("start",), ("start",), ("save", 1)]


def test_steps_are_saved_one_after_the_other(manage: Manage, mesh: Mesh) -> None:
    manager, state = started(manage, mesh, interval=1)
    writer = writer_of(saver_of(manager))
    steps(manager, state, mesh, 2)
    writer.commits_in = 1
    complete(manager, mesh)
    assert manager.saved_step == 1
    steps(manager, state, mesh, 1)
    complete(manager, mesh)
    assert writer.orders == [("start",), ("save", 1), ("committed",), ("save", 4)]


def test_the_last_save_follows_the_one_in_progress(manage: Manage, mesh: Mesh) -> None:
    manager, _ = started(manage, mesh, enable_first_step_checkpoint=True)
    saver = saver_of(manager)
    complete(manager, mesh)
    writer = writer_of(saver)
    writer.commits_in = 3
    saver.finish()
    assert writer.orders == [("start",), ("save", 1), ("committed",)]
    assert saver.saved_step == 1


def test_a_last_save_that_fails_twice_is_an_error(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, _ = started(manage, mesh)
    saver = saver_of(manager)
    writer = writer_of(saver)

    def fails() -> list[dict[str, Any]]:
        return [{"failed": 1, "error": "OSError", "token": writer.token}]

    monkeypatch.setattr(writer, "responses", fails)
    with pytest.raises(CheckpointError, match="Step 1 could not be saved"):
        saver.finish()
    assert writer.orders == [
        ("start",), ("save", 1), ("abandon", 1), ("save", 1), ("abandon", 1),
    ]  # fmt: skip


def test_a_run_that_stops_early_leaves_its_writer_to_itself(manage: Manage, mesh: Mesh) -> None:
    manager, _ = started(manage, mesh)
    writer = writer_of(saver_of(manager))
    for _ in range(2):
        manager.close()
        assert writer.orders == [("start",), ("detach",)]


def test_all_saves_are_waited_for(manage: Manage, mesh: Mesh) -> None:
    manager, _ = started(manage, mesh, enable_first_step_checkpoint=True)
    writer_of(saver_of(manager)).commits_in = 3
    manager.wait_for_saves()
    assert manager.saved_step == 1


def test_a_model_only_save_follows_the_one_in_progress(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, _ = started(manage, mesh, enable_first_step_checkpoint=True, last_save_model_only=True)
    writer = writer_of(saver_of(manager))
    writer.commits_in = 3

    def save(*, model_only: bool) -> None:
        writer.orders.append(("model only",))

    monkeypatch.setattr(manager._synchronous, "save", save)
    manager.final_save(finished=True)
    manager.close()
    assert writer.orders == [
        ("start",), ("save", 1), ("committed",), ("model only",), ("close", True),
    ]  # fmt: skip


def test_the_state_is_not_replaced_while_it_is_copied(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, _ = started(manage, mesh)
    waits: list[str] = []
    monkeypatch.setattr(saver_of(manager)._copier, "wait", lambda: waits.append("copied"))
    manager.wait_for_snapshot()
    assert waits == ["copied"]
    assert manager.restore_earlier(0, lambda values: True) is None
    assert waits == ["copied", "copied"]
