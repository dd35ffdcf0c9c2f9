"""Which rank is whose buddy, and when a rank's trainer orders copies: one process that is its own
buddy, with its real writer and copying process."""

import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.checkpoint.conftest import Manage, SmallState, crash
from tests.unit.checkpoint.test_asynchronous import complete, saver_of, steps, until
from torchtitan_lite.checkpoint import async_setup, buddies
from torchtitan_lite.checkpoint import manager as manager_module
from torchtitan_lite.checkpoint.buddies import (
    BuddyCopies,
    BuddyPairing,
    BuddyProcess,
    CopySignals,
    buddies_of,
    pair_buddies,
)
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.shared_memory.folder import COPY, region_path
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.mesh import Mesh

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


@pytest.mark.parametrize(
    ("rank", "sources", "sources_here"), [(0, (2,), {2, 3}), (1, (3,), {2, 3}), (2, (0,), {0, 1})]
)
def test_a_rank_receives_the_copies_of_those_whose_buddy_it_is(
    monkeypatch: pytest.MonkeyPatch, rank: int, sources: tuple[int, ...], sources_here: set[int]
) -> None:
    monkeypatch.setattr(buddies, "all_gather_ints", lambda mine: [7, 7, 9, 9])
    context: Any = SimpleNamespace(
        config=SimpleNamespace(buddy_interval=1), mesh=SimpleNamespace(rank=rank)
    )
    assert pair_buddies(context) == BuddyPairing(sources, frozenset(sources_here))


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
@pytest.mark.parametrize("ram_interval", [0, 3, pytest.param(1, marks=pytest.mark.matrix)])
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
    wait_for_copy(manager, mesh, 1)
    steps(manager, state, mesh, 1)
    saver = saver_of(manager)
    until(manager, mesh, lambda: saver.saved_step == 2, "step 2 is saved")
    for step, saved_step in ((4, 4), (7, 6)):
        steps(manager, state, mesh, step - state.step)
        wait_for_copy(manager, mesh, step)
        # A save that is due during another one is of a later step.
        manager.wait_for_saves()
        assert saver.saved_step == saved_step
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


def stop(manager: CheckpointManager) -> int:
    """Suspend the copying process, as on a machine that hangs, and return its id."""
    pid = buddies_in(manager).process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.usefixtures("own_buddy")
def test_a_resume_keeps_the_newest_copies_until_there_are_newer_ones(
    manage: Manage, mesh: Mesh
) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=1, buddy_interval=100)
    steps(manager, state, mesh, 1)
    wait_for_copy(manager, mesh, 1)
    steps(manager, state, mesh, 3)
    complete(manager, mesh)
    crash(manager)
    resumed = SmallState()
    again = manage(resumed, **_COPYING, ram_interval=1, buddy_interval=100)
    assert again.restore() == "step 4 in shared memory"
    steps(again, resumed, mesh, 1)
    pid = stop(again)
    try:
        steps(again, resumed, mesh, 5)
        complete(again, mesh)
        region = saver_of(again)._region
        # Another lost machine would return the run to step 1, not to storage.
        assert 1 in region.complete_slots() and 1 in copied(again)
        assert len(region.generation_ids) == 2
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for_copy(again, mesh, 5)
    steps(again, resumed, mesh, 4)
    complete(again, mesh)
    assert 1 not in region.complete_slots() and sorted(copied(again)) == [1, 5]
    assert len(region.generation_ids) == 1


@pytest.mark.usefixtures("own_buddy")
@pytest.mark.parametrize("num_steps", [1, 3])
def test_copies_outlive_resumes_that_end_before_the_first_new_copy(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    # The order of the generations' names does not decide which of them a resume continues.
    names, agree = iter("dcba"), manager_module.agree_on_identity
    monkeypatch.setattr(
        manager_module,
        "agree_on_identity",
        lambda *about: replace(agree(*about), generation_id=next(names) * 12),
    )
    manager = manage(state := SmallState(), **_COPYING, ram_interval=1, buddy_interval=100)
    steps(manager, state, mesh, 1)
    wait_for_copy(manager, mesh, 1)
    steps(manager, state, mesh, 3)
    complete(manager, mesh)
    own = saver_of(manager).region_path
    crash(manager)
    # As if the connection to the buddy were lost: its region does not join the generations.
    monkeypatch.setattr(BuddyProcess, "copy", lambda self, order: None)
    for _ in range(2):
        manager = manage(state := SmallState(), **_COPYING, ram_interval=1, buddy_interval=100)
        assert str(manager.restore()).endswith("in shared memory")
        steps(manager, state, mesh, num_steps)
        assert buddies_in(manager).copied_step == 1
        crash(manager)
    own.unlink()
    manager = manage(SmallState(), **_COPYING, ram_interval=1, buddy_interval=100)
    assert manager.restore() == "step 1 in shared memory, with the buddy copies of ranks 0"


@pytest.mark.usefixtures("own_buddy")
def test_a_lost_machine_is_restored_twice_from_the_same_copies(manage: Manage, mesh: Mesh) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=1, buddy_interval=100)
    steps(manager, state, mesh, 1)
    wait_for_copy(manager, mesh, 1)
    steps(manager, state, mesh, 3)
    for _ in range(3):
        complete(manager, mesh)
        own = saver_of(manager).region_path
        crash(manager)
        own.unlink()
        manager = manage(resumed := SmallState(), **_COPYING, ram_interval=1, buddy_interval=100)
        assert manager.restore() == "step 1 in shared memory, with the buddy copies of ranks 0"
        steps(manager, resumed, mesh, 1)
        os.kill(stop(manager), signal.SIGKILL)
        steps(manager, resumed, mesh, 1)


@pytest.mark.usefixtures("own_buddy")
def test_a_damaged_copy_is_named_and_the_copy_before_it_is_used(
    manage: Manage, mesh: Mesh, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=1, buddy_interval=2)
    steps(manager, state, mesh, 1)
    wait_for_copy(manager, mesh, 1)
    steps(manager, state, mesh, 2)
    wait_for_copy(manager, mesh, 3)
    own = saver_of(manager).region_path
    crash(manager)
    own.unlink()
    path = region_path(own.parent, 0, COPY)
    region = Region.open(path, writable=True)
    region.data(region.complete_slots()[3])[10] ^= 1
    region.close()
    again = manage(SmallState(), **_COPYING, ram_interval=1, buddy_interval=2)
    assert again.restore() == "step 1 in shared memory, with the buddy copies of ranks 0"
    (warning,) = [r.getMessage() for r in logged.records if "not used" in r.getMessage()]
    assert f"{path} is damaged" in warning


@pytest.mark.usefixtures("own_buddy")
@pytest.mark.parametrize("is_copy_damaged", [False, True])
def test_the_copy_of_a_damaged_snapshot_of_the_same_step_is_used(
    manage: Manage, mesh: Mesh, logged: pytest.LogCaptureFixture, is_copy_damaged: bool
) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=2, buddy_interval=2)
    for step in (1, 3):
        steps(manager, state, mesh, step - state.step)
        wait_for_copy(manager, mesh, step)
    own = saver_of(manager).region_path
    crash(manager)
    copies = Region.open(region_path(own.parent, 0, COPY), writable=True)
    snapshots = Region.open(own, writable=True)
    copied, slot = copies.complete_slots()[3], snapshots.complete_slots()[3]
    # As the writer does when it saves the step.
    snapshots.store_digests(slot, copies.digests(copied) or {})
    snapshots.data(slot)[10] ^= 1
    if is_copy_damaged:
        copies.data(copied)[10] ^= 1
    for region in (snapshots, copies):
        region.close()
    again = manage(resumed := SmallState(), **_COPYING, ram_interval=2, buddy_interval=2)
    expected = "step 3 in shared memory, with the buddy copies of ranks 0"
    assert again.restore() == ("step 1 in shared memory" if is_copy_damaged else expected)
    warnings = [r.getMessage() for r in logged.records if "not used" in r.getMessage()]
    assert len(warnings) == 1 + is_copy_damaged and f"{own} is damaged" in warnings[0]
    # The damaged part is not used, saved or copied afterwards.
    steps(again, resumed, mesh, 1)
    assert 3 not in saver_of(again)._region.complete_slots()


@pytest.mark.usefixtures("own_buddy")
def test_a_stuck_copy_is_reported_once_and_so_is_its_recovery(
    manage: Manage, mesh: Mesh, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=1, buddy_interval=2)
    steps(manager, state, mesh, 1)
    wait_for_copy(manager, mesh, 1)
    monkeypatch.setattr(buddies, "_STUCK_S", 0.3)
    logged.set_level("INFO", logger.name)
    pid = stop(manager)
    try:
        steps(manager, state, mesh, 2)
        complete(manager, mesh)
        assert not manager.events()
        time.sleep(0.4)
        steps(manager, state, mesh, 4)
        complete(manager, mesh)
    finally:
        os.kill(pid, signal.SIGCONT)
    address = buddies_in(manager).process.settings.address
    (warning,) = [r.getMessage() for r in logged.records if r.levelname == "WARNING"]
    assert f"Step 3 is not copied to another machine: Rank 0 at {address}, the buddy of" in warning
    assert "The newest copy is of step 1, taken" in warning
    (failed,) = manager.events()
    assert failed.name == "buddy_copies_failed" and failed.values["copied_step"] == 1
    assert failed.values["copy_age_s"] > 0.3 and address in failed.values["reason"]
    wait_for_copy(manager, mesh, 3)
    (recovered,) = manager.events()
    assert recovered.name == "buddy_copies_recovered" and recovered.values["copied_step"] == 3
    assert any(
        "Step 3 is copied to another machine, after" in r.getMessage() for r in logged.records
    )


def buddies_of_sources(
    manage: Manage, mesh: Mesh, sources: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> BuddyCopies:
    """Return copies from these ranks, the first of which is begun but does not reach the
    process."""
    # The address of each rank is looked up, but there is only one rank.
    monkeypatch.setattr(buddies, "all_gather_bytes", lambda about: [about] * 3)
    pairing = BuddyPairing(tuple(sources), frozenset(sources))
    monkeypatch.setattr(async_setup, "pair_buddies", lambda context: pairing)
    state = SmallState()
    manager = manage(state, **_COPYING, ram_interval=1, buddy_interval=2)
    steps(manager, state, mesh, 1)
    found = buddies_in(manager)
    monkeypatch.setattr(BuddyProcess, "copy", lambda self, order: None)
    return found


def test_a_stuck_source_is_named_although_others_advance(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = buddies_of_sources(manage, mesh, (1, 2), monkeypatch)
    monkeypatch.setattr(buddies, "_STUCK_S", 0.3)
    copy = found._copy
    assert copy is not None and not found.signals().stuck and copy.missing == {1, 2}
    number = copy.order.number
    time.sleep(0.4)
    found._handle({"progress": number, "source": 1})
    assert found.signals().stuck and "the buddy of rank 2, has received" in found._reason(copy)
    # A response about an earlier copy is not progress of this one.
    for kind in ("progress", "received", "failed"):
        found._handle({kind: number - 1, "source": 2, "error": "late"})
        assert found.signals().stuck and not copy.error and copy.missing == {1, 2}
    found._handle({"progress": number, "source": 2})
    assert not found.signals().stuck
    found._handle({"received": number, "source": 2})
    time.sleep(0.4)
    assert found.signals().stuck and "the buddy of rank 1, has received" in found._reason(copy)
    found._handle({"received": number, "source": 1})
    assert not found.signals().stuck and not found.signals().pending


def test_a_rank_that_receives_no_copies_names_itself_if_its_process_dies(
    manage: Manage, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = buddies_of_sources(manage, mesh, (), monkeypatch)
    copy, process = found._copy, found.process
    assert copy is not None
    for _ in range(2):
        os.kill(process.pid or 0, signal.SIGKILL)
        assert process._process is not None
        process._process.wait(30)
        found.signals()
    address = process.settings.address
    expected = f"Rank 0 at {address}: the process that copies snapshots died twice."
    assert found._reason(copy) == expected


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


@pytest.mark.parametrize("is_leader", [True, False])
@pytest.mark.parametrize(
    ("signals", "is_complete", "reports"),
    [
        (CopySignals(0, 0, 0), True, ["success"]),
        (CopySignals(1, 0, 0), False, []),
        # It may still arrive.
        (CopySignals(1, 0, 1), False, ["failure"]),
        (CopySignals(0, 1, 0), False, ["failure", "cancelled"]),
    ],
)
def test_a_copy_is_complete_once_all_ranks_have_it(
    signals: CopySignals,
    is_complete: bool,
    reports: list[str],
    is_leader: bool,
    logged: pytest.LogCaptureFixture,
) -> None:
    logged.set_level(logging.INFO, "torchtitan_lite")
    found: list[str] = []
    copies: Any = SimpleNamespace(
        _copy=SimpleNamespace(order=SimpleNamespace(slot=1, segment=0, step=7), begun_s=1.0),
        _has_copied=False,
        _context=SimpleNamespace(mesh=SimpleNamespace(is_leader=is_leader)),
        _report_failure=lambda copy: found.append("failure"),
        _report_success=lambda step: found.append("success"),
        cancel=lambda: found.append("cancelled"),
    )
    assert BuddyCopies.apply(copies, signals) is is_complete
    assert found == reports
    assert len(logged.messages) == int(is_complete and is_leader)
    if is_complete:
        assert BuddyCopies.apply(copies, signals) is False, "there is no copy any more"


@pytest.mark.parametrize("is_leader", [True, False])
def test_the_leader_logs_when_copies_fail_and_when_they_arrive_again(
    is_leader: bool, mesh: Mesh, logged: pytest.LogCaptureFixture
) -> None:
    logged.set_level(logging.INFO, "torchtitan_lite")
    config = SimpleNamespace(buddy_interval=5)
    copies: Any = SimpleNamespace(
        _failing_since_s=None,
        _kept=None,
        _events=[],
        _reason=lambda copy: "it was lost.",
        _context=SimpleNamespace(mesh=SimpleNamespace(is_leader=is_leader), config=config),
        copied_step=-1,
    )
    copy: Any = SimpleNamespace(order=SimpleNamespace(step=7), begun_s=1.0)
    for _ in range(2):
        BuddyCopies._report_failure(copies, copy)
    for _ in range(2):
        BuddyCopies._report_success(copies, 9)
    assert [event.name for event in copies._events] == [
        "buddy_copies_failed",
        "buddy_copies_recovered",
    ]
    starts = [
        "Step 7 is not copied to another machine: it was lost.",
        "Step 9 is copied to another",
    ]
    assert len(logged.messages) == 2 * is_leader
    assert all(text.startswith(one) for text, one in zip(logged.messages, starts, strict=False))
