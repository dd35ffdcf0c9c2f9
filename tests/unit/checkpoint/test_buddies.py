"""Which rank is whose buddy, and when a rank's trainer orders copies: one process that is its own
buddy, with its real writer and copying process."""

import os
import signal

import pytest

from tests.unit.checkpoint.conftest import Manage, SmallState, crash
from tests.unit.checkpoint.test_asynchronous import complete, saver_of, steps, until
from torchtitan_lite.checkpoint import async_setup
from torchtitan_lite.checkpoint.buddies import BuddyCopies, BuddyPairing, buddies_of
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.shared_memory.folder import COPY, region_path
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.mesh import Mesh

_COPYING = {"async_mode": "async", "interval": 1000, "enable_first_step_checkpoint": False}


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([7], None),
        ([7, 7, 7], None),
        ([7, 9], [1, 0]),
        ([7, 7, 9, 9], [2, 3, 0, 1]),
        ([7, 9, 4], [1, 2, 0]),
        ([7, 7, 9, 9, 4, 4], [2, 3, 4, 5, 0, 1]),
        ([7, 7, 7, 9], [3, 3, 3, 0]),
        ([7, 7, 9, 4, 4, 4], [2, 2, 3, 0, 1, 0]),
        ([7, 9, 7, 9], [1, 0, 3, 2]),
    ],
)
def test_the_buddy_is_on_the_next_machine(machines: list[int], expected: list[int] | None) -> None:
    found = buddies_of(machines)
    assert found == expected
    for rank, buddy in enumerate(found or []):
        assert machines[buddy] != machines[rank]


@pytest.fixture
def own_buddy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rank 0 its own buddy, although there is one machine."""
    pairing = BuddyPairing((0,), frozenset([0]))
    monkeypatch.setattr(async_setup, "pair_buddies", lambda context: pairing)


def buddies_in(manager: CheckpointManager) -> BuddyCopies:
    found = saver_of(manager).buddies
    assert found is not None
    return found


def wait_for_copy(manager: CheckpointManager, mesh: Mesh, step: int) -> None:
    """Exchange signals until a step is copied."""
    buddies = buddies_in(manager)
    until(manager, mesh, lambda: buddies.copied_step == step, f"step {step} is copied")


def copied(manager: CheckpointManager) -> dict[int, int]:
    """Return step -> segment of the complete copies."""
    region = Region.open(region_path(buddies_in(manager).process.folder, 0, COPY))
    found = {step: region.values(slot)["segment"] for step, slot in region.complete_slots().items()}
    region.close()
    return found


@pytest.mark.usefixtures("own_buddy")
@pytest.mark.parametrize("ram_interval", [0, 1, 3])
def test_copies_have_their_interval_whatever_that_of_snapshots(
    manage: Manage, mesh: Mesh, ram_interval: int
) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=ram_interval, buddy_interval=4)
    found = []
    for step in range(1, 14):
        steps(manager, state, mesh, 1)
        buddies = buddies_in(manager)
        if buddies._copy is not None:
            found.append(step)
            wait_for_copy(manager, mesh, step)
    assert found == [1, 5, 9, 13]
    assert sorted(copied(manager)) == [9, 13]


@pytest.mark.usefixtures("own_buddy")
def test_snapshots_and_saves_go_on_while_a_copy_and_a_save_are_slow(
    manage: Manage, mesh: Mesh
) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING | {"interval": 3}, ram_interval=1, buddy_interval=2)
    steps(manager, state, mesh, 1)
    wait_for_copy(manager, mesh, 1)
    buddies, saver = buddies_in(manager), saver_of(manager)
    for process in (buddies.process, saver._writer):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
    try:
        steps(manager, state, mesh, 10)
        complete(manager, mesh)
        # Of step 1, which is copied; 3, which is copied and saved; and the newest two.
        assert {1, 3, 10, 11} <= saver._region.complete_slots().keys()
        assert saver._save is not None and saver._save.step == 3
        assert buddies.copied_step == 1
    finally:
        for process in (buddies.process, saver._writer):
            os.kill(process.pid or 0, signal.SIGCONT)
    wait_for_copy(manager, mesh, 3)
    until(manager, mesh, lambda: saver.saved_step == 3, "step 3 is saved")


@pytest.mark.usefixtures("own_buddy")
def test_a_copy_in_flight_is_ordered_again_from_a_restarted_process(
    manage: Manage, mesh: Mesh
) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=1, buddy_interval=2)
    steps(manager, state, mesh, 1)
    wait_for_copy(manager, mesh, 1)
    process = buddies_in(manager).process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    steps(manager, state, mesh, 2)
    complete(manager, mesh)
    os.kill(process.pid, signal.SIGKILL)
    wait_for_copy(manager, mesh, 3)
    assert sorted(copied(manager)) == [1, 3]
    # The next copy tolerates a death, too.
    os.kill(process.pid, signal.SIGKILL)
    steps(manager, state, mesh, 2)
    wait_for_copy(manager, mesh, 5)


@pytest.mark.usefixtures("own_buddy")
def test_a_roll_back_abandons_copies(manage: Manage, mesh: Mesh) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING | {"interval": 2}, ram_interval=1, buddy_interval=3)
    steps(manager, state, mesh, 1)
    first = manager._context.lineage.segment
    steps(manager, state, mesh, 1)
    saver = saver_of(manager)
    until(manager, mesh, lambda: saver.saved_step == 2, "step 2 is saved")
    for step in (4, 7):
        steps(manager, state, mesh, step - state.step)
        wait_for_copy(manager, mesh, step)
    manager.wait_for_saves()
    assert manager.restore_earlier(3, lambda saved: True) == f"{manager.root}/step-2"
    assert buddies_in(manager).copied_step is None
    crash(manager)
    # The copies of steps 4 and 7 outlive the process, but not as steps of the history.
    resumed = SmallState()
    again = manage(resumed, **_COPYING | {"interval": 2}, ram_interval=1, buddy_interval=3)
    assert again.restore() == f"{again.root}/step-6"
    steps(again, resumed, mesh, 1)
    assert again._context.lineage.segment > first
    wait_for_copy(again, mesh, 7)
    assert copied(again)[7] == again._context.lineage.segment


@pytest.mark.usefixtures("own_buddy")
def test_a_completed_run_leaves_no_copies(manage: Manage, mesh: Mesh) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=1, buddy_interval=2)
    steps(manager, state, mesh, 1)
    wait_for_copy(manager, mesh, 1)
    folder = buddies_in(manager).process.folder
    assert region_path(folder, 0, COPY).exists()
    manager.final_save(finished=True)
    assert not folder.exists()


def test_one_machine_is_warned_about(
    manage: Manage, mesh: Mesh, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=1, buddy_interval=2)
    steps(manager, state, mesh, 3)
    complete(manager, mesh)
    assert saver_of(manager).buddies is None
    warnings = [r.getMessage() for r in logged.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "checkpoint.buddy_interval = 2 has no effect" in warnings[0]
