"""Asynchronous saves, in one process with its real writer."""

import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.unit.checkpoint.conftest import (
    Manage,
    SmallState,
    crash,
    manifest_in,
    run_id_in,
    same,
    steps_in,
)
from torchtitan_lite.checkpoint import restore
from torchtitan_lite.checkpoint.async_saver import AsynchronousSaver
from torchtitan_lite.checkpoint.leftover_snapshots import SnapshotOrigin
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.save_context import SaveContext
from torchtitan_lite.checkpoint.save_plan import SavePlan
from torchtitan_lite.checkpoint.shared_memory.description import RegionDescription
from torchtitan_lite.checkpoint.shared_memory.folder import (
    RankLock,
    list_runs,
    region_files,
    shared_memory_folder,
)
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.mesh import Mesh

ASYNC = {"async_mode": "async", "ram_interval": 1}
_STEPS_LATER_S = 100


def step(manager: CheckpointManager, state: SmallState, mesh: Mesh) -> None:
    """Take a step in the order of calls of the trainer."""
    totals = mesh.all_reduce_(manager.local_signals())
    manager.apply_signals(totals)
    state.take_step()
    manager.after_step()


def steps(manager: CheckpointManager, state: SmallState, mesh: Mesh, number: int) -> None:
    for _ in range(number):
        step(manager, state, mesh)


def complete(manager: CheckpointManager, mesh: Mesh) -> None:
    """Make the calls with which the next step begins, before it changes the state."""
    manager.apply_signals(mesh.all_reduce_(manager.local_signals()))


def until(manager: CheckpointManager, mesh: Mesh, reached: Callable[[], bool], what: str) -> None:
    """Exchange messages with the writer until the condition holds."""
    deadline = time.monotonic() + _STEPS_LATER_S
    while not reached():
        assert time.monotonic() < deadline, f"not in {_STEPS_LATER_S} s: {what}"
        complete(manager, mesh)
        time.sleep(0.01)


def saver_of(manager: CheckpointManager) -> AsynchronousSaver:
    """Return the asynchronous saver, which exists from the first step on."""
    assert manager._asynchronous is not None
    return manager._asynchronous


def first_step_saved(
    manager: CheckpointManager, state: SmallState, mesh: Mesh
) -> AsynchronousSaver:
    """Take one step and block until it is saved."""
    steps(manager, state, mesh, 1)
    saver = saver_of(manager)
    until(manager, mesh, lambda: saver.saved_step == 1, "step 1 is saved")
    return saver


def copy_of(state: SmallState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors().items()}


def crash_after(
    manager: CheckpointManager, state: SmallState, mesh: Mesh, number: int
) -> dict[str, torch.Tensor]:
    """Take steps, the last of which is complete in memory, and crash. Returns the state at that
    time."""
    steps(manager, state, mesh, number)
    complete(manager, mesh)
    crash(manager)
    return copy_of(state)


def memory_of(dump_folder: Path) -> list[Path]:
    """Return a run's regions in shared memory."""
    folders = [run.path for run in list_runs() if run.run_id == run_id_in(dump_folder)]
    return [path for folder in folders for path in region_files(folder).values()]


def warnings_in(logged: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in logged.records if r.levelname == "WARNING"]


def test_steps_are_saved_during_training(manage: Manage, mesh: Mesh, tmp_path: Path) -> None:
    state = SmallState()
    manager = manage(state, interval=3, **ASYNC)
    assert manager.restore() is None
    saver = first_step_saved(manager, state, mesh)
    steps(manager, state, mesh, 2)
    expected = copy_of(state)
    steps(manager, state, mesh, 1)
    until(manager, mesh, lambda: saver.saved_step == 3, "step 3 is saved")
    assert steps_in(manager.root) == ["step-1", "step-3"]
    assert manifest_in(f"{manager.root}/step-3").values["dataloader"] == {"cursor": 24}
    assert manager.consecutive_failures == 0
    assert len(memory_of(tmp_path)) == 1
    assert memory_of(tmp_path)[0].stat().st_mode & 0o777 == 0o600

    other = SmallState(seed=1)
    assert manage(other, load_step=3).restore() == f"{manager.root}/step-3"
    assert same(other.tensors(), expected)


def test_the_final_save_is_durable_and_frees_the_memory(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, keep_latest_k=2, **ASYNC)
    steps(manager, state, mesh, 4)
    assert manager.final_save(finished=True) == f"{manager.root}/step-4"
    assert memory_of(tmp_path) == []
    other = SmallState()
    assert manage(other, **ASYNC).restore() == f"{manager.root}/step-4"
    assert same(other.tensors(), state.tensors())
    # A committed step is not saved again.
    written = Path(manager.root, "step-4", "manifest.json").stat().st_ino
    assert manager.final_save(finished=True) == f"{manager.root}/step-4"
    assert Path(manager.root, "step-4", "manifest.json").stat().st_ino == written


def test_a_last_step_that_is_already_saved_is_not_saved_again(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=2, **ASYNC)
    saver = first_step_saved(manager, state, mesh)
    steps(manager, state, mesh, 1)
    until(manager, mesh, lambda: saver.saved_step == 2, "step 2 is saved")
    written = Path(manager.root, "step-2", "manifest.json").stat().st_ino
    assert manager.final_save(finished=True) == f"{manager.root}/step-2"
    assert Path(manager.root, "step-2", "manifest.json").stat().st_ino == written
    assert memory_of(tmp_path) == []


def test_a_crash_of_all_processes_loses_no_complete_step(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    expected, cursor = crash_after(manager, state, mesh, 5), state.cursor

    other = SmallState(seed=1)
    manager = manage(other, interval=100, **ASYNC)
    assert manager.restore() == "step 5 in shared memory"
    assert same(other.tensors(), expected)
    assert (other.step, other.cursor) == (5, cursor)
    # The region is adopted, and its step stays until a newer one is complete.
    (path,) = memory_of(tmp_path)
    before = path.stat().st_ino
    steps(manager, other, mesh, 1)
    assert path.stat().st_ino == before
    crash(manager)
    third = SmallState()
    manager = manage(third, interval=100, **ASYNC)
    assert manager.restore() in ("step 5 in shared memory", "step 6 in shared memory")
    steps(manager, third, mesh, 1)
    manager.final_save(finished=True)
    assert memory_of(tmp_path) == []
    assert third.step in (6, 7)
    assert f"step-{third.step}" in steps_in(manager.root)


@pytest.mark.parametrize(
    ("is_another_mesh", "is_stored"), [(True, False), (True, True), (False, False)]
)
def test_before_the_memory_of_another_mesh_is_freed_the_state_is_stored(
    manage: Manage,
    mesh: Mesh,
    monkeypatch: pytest.MonkeyPatch,
    is_another_mesh: bool,
    is_stored: bool,
) -> None:
    """Unless the writer of that mesh has stored it."""
    settings = ASYNC | {"interval": 100, "enable_first_step_checkpoint": False}
    describe = SaveContext.describe

    def of_another_mesh(self: SaveContext, plan: SavePlan) -> RegionDescription:
        return replace(describe(self, plan), mesh={"dp_shard": 2})

    state = SmallState()
    manager = manage(state, **settings)
    with monkeypatch.context() as patch:
        if is_another_mesh:
            patch.setattr(SaveContext, "describe", of_another_mesh)
        expected = crash_after(manager, state, mesh, 5)
    other = SmallState(seed=1)
    manager = manage(other, **settings)
    assert manager.restore() == "step 5 in shared memory"
    assert same(other.tensors(), expected)
    if is_stored:
        monkeypatch.setattr(manager, "newest_stored", lambda: 5)
    steps(manager, other, mesh, 1)
    assert Path(manager.root, "step-6").exists() is (is_another_mesh and not is_stored)


@pytest.mark.parametrize("crashes", [1, 2])
def test_a_crash_during_the_adoption_of_memory_loses_nothing(
    manage: Manage, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashes: int
) -> None:
    """Before all regions have recorded the step from which the run resumes."""
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    start = manager._context.identity.generation_id
    expected = crash_after(manager, state, mesh, 5)
    for _ in range(crashes):
        other = SmallState(seed=1)
        manager = manage(other, interval=100, **ASYNC)
        assert manager.restore() == "step 5 in shared memory"
        with monkeypatch.context() as patch:
            patch.setattr(AsynchronousSaver, "resume_from", lambda self, origin: None)
            manager.after_step()
        crash(manager)
        (path,) = memory_of(tmp_path)
        region = Region.open(path)
        assert len(region.generation_ids) == 2
        region.close()
    other = SmallState(seed=2)
    manager = manage(other, interval=100, **ASYNC)
    assert manager.restore() == "step 5 in shared memory"
    assert same(other.tensors(), expected)
    steps(manager, other, mesh, 1)
    (path,) = memory_of(tmp_path)
    region = Region.open(path)
    assert region.generation_ids == [manager._context.identity.generation_id] != [start]
    region.close()


def test_a_crash_during_a_copy_yields_the_step_before(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    expected = crash_after(manager, state, mesh, 3)
    (path,) = memory_of(tmp_path)
    region = Region.open(path, writable=True)
    held = {header.step: slot for slot, header in enumerate(region.slots())}
    region.begin(next(slot for at, slot in held.items() if at != 3), 4)
    region.close()
    other = SmallState(seed=1)
    assert manage(other, **ASYNC).restore() == "step 3 in shared memory"
    assert same(other.tensors(), expected)


def test_after_a_crash_of_the_trainer_the_writer_flushes(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    steps(manager, state, mesh, 3)
    complete(manager, mesh)
    expected = copy_of(state)
    (path,) = memory_of(tmp_path)
    lock = RankLock(path.parent, 0)
    until(manager, mesh, lambda: lock.owner() is not None, "the writer has started")
    manager.close()
    assert lock.wait(_STEPS_LATER_S)
    assert "step-3" in steps_in(manager.root)
    other = SmallState(seed=1)
    assert manage(other).restore() == f"{manager.root}/step-3"
    assert same(other.tensors(), expected)


def test_an_explicit_step_is_loaded_from_storage(manage: Manage, mesh: Mesh) -> None:
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    steps(manager, state, mesh, 1)
    expected = copy_of(state)
    saver = saver_of(manager)
    until(manager, mesh, lambda: saver.saved_step == 1, "step 1 is saved")
    steps(manager, state, mesh, 3)
    crash(manager)
    other = SmallState(seed=1)
    assert manage(other, load_step=1, **ASYNC).restore() == f"{manager.root}/step-1"
    assert same(other.tensors(), expected)
    with pytest.raises(CheckpointError, match=r"load_step = 4, but .* holds the steps: 1\."):
        manage(SmallState(), load_step=4, **ASYNC).restore()


def test_another_run_does_not_use_these_snapshots(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, enable_first_step_checkpoint=False, **ASYNC)
    steps(manager, state, mesh, 3)
    crash(manager)
    other = tmp_path / "other"
    assert manage(SmallState(), dump_folder=other, **ASYNC).restore() is None
    assert run_id_in(other) not in (None, run_id_in(tmp_path))
    assert manage(SmallState()).restore() is None, "saves that wait use no shared memory"
    assert manage(SmallState(), **ASYNC).restore() == "step 3 in shared memory"


def test_a_failed_save_is_counted_and_retried(
    manage: Manage, mesh: Mesh, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state, **ASYNC)
    Path(manager.root).write_text("a file where the folder should be")
    steps(manager, state, mesh, 1)
    for number in (1, 2, 3):
        until(
            manager, mesh, lambda n=number: manager.consecutive_failures >= n, f"failure {number}"
        )
        assert manager.consecutive_failures == number
        steps(manager, state, mesh, 1)
    errors = [r.getMessage() for r in logged.records if r.levelname == "ERROR"]
    assert any("Training continues, and the save will be retried." in error for error in errors)
    assert any("File" in error or "directory" in error for error in errors)
    Path(manager.root).unlink()
    saver = saver_of(manager)

    def is_saved() -> bool:
        if saver._save is None and saver.saved_step is None:
            step(manager, state, mesh)
        return saver.saved_step is not None

    until(manager, mesh, is_saved, "a step is saved")
    assert manager.consecutive_failures == 0
    assert manager.final_save(finished=True) == f"{manager.root}/step-{state.step}"


def test_a_failed_final_save_is_an_error_and_keeps_the_memory(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, enable_first_step_checkpoint=False, **ASYNC)
    Path(manager.root).write_text("a file where the folder should be")
    steps(manager, state, mesh, 2)
    with pytest.raises(CheckpointError, match=r"Step 2 could not be saved .* shared memory"):
        manager.final_save(finished=True)
    assert len(memory_of(tmp_path)) == 1
    Path(manager.root).unlink()
    assert manager.final_save(finished=True) == f"{manager.root}/step-2"
    assert memory_of(tmp_path) == []


def test_a_writer_that_dies_fails_the_save_and_is_replaced(
    manage: Manage, mesh: Mesh, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state, writer_mib_per_s=1e-5, interval=2, **ASYNC)
    steps(manager, state, mesh, 1)
    complete(manager, mesh)
    saver = saver_of(manager)
    assert saver._writer.pid is not None
    os.kill(saver._writer.pid, 9)
    until(manager, mesh, lambda: manager.consecutive_failures == 1, "the death is seen")
    assert manager.final_save(finished=True) == f"{manager.root}/step-1"


@pytest.mark.parametrize("limit", ["checkpoint.snapshot_gib", "machine"])
def test_too_little_memory_is_reported_once_and_saves_are_synchronous(
    manage: Manage,
    mesh: Mesh,
    tmp_path: Path,
    logged: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    settings = dict(ASYNC)
    if limit == "machine":
        monkeypatch.setattr(
            "torchtitan_lite.checkpoint.shared_memory.region_file._memory_available", lambda: 4096
        )
    else:
        settings["snapshot_gib"] = 1e-9
    state = SmallState()
    manager = manage(state, **settings)
    steps(manager, state, mesh, 3)
    (warning,) = warnings_in(logged)
    assert "Snapshots are disabled, and saves are synchronous" in warning
    assert limit in warning
    assert steps_in(manager.root) == ["step-1", "step-2", "step-3"]
    assert memory_of(tmp_path) == []
    assert manager.final_save(finished=True) == f"{manager.root}/step-3"
    other = SmallState()
    assert manage(other, **settings).restore() == f"{manager.root}/step-3"
    assert same(other.tensors(), state.tensors())


def test_saves_without_a_snapshot_interval(manage: Manage, mesh: Mesh) -> None:
    state = SmallState()
    manager = manage(state, interval=2, **(ASYNC | {"ram_interval": 0}))
    steps(manager, state, mesh, 2)
    saver = saver_of(manager)
    until(manager, mesh, lambda: saver.saved_step is not None, "a step is saved")
    manager.final_save(finished=True)
    assert "step-2" in steps_in(manager.root)


def test_a_run_that_resumes_at_its_last_step_saves_and_frees_it(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    """Killed after its last step, before that step was saved."""
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    crash_after(manager, state, mesh, 2)
    other = SmallState(seed=1)
    manager = manage(other, interval=100, **ASYNC)
    assert manager.restore() == "step 2 in shared memory"
    assert manager.final_save(finished=True) == f"{manager.root}/step-2"
    assert "step-2" in steps_in(manager.root)
    assert memory_of(tmp_path) == []


def test_a_snapshot_that_changes_while_it_is_read_is_not_used(
    manage: Manage, mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes run at once."""
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    first_step_saved(manager, state, mesh)
    crash_after(manager, state, mesh, 2)
    load = restore.load

    def load_beside_the_other(*args: Any) -> None:
        load(*args)
        for path in memory_of(tmp_path):
            region = Region.open(path, writable=True)
            for slot in range(region.num_slots):
                region.begin(slot, 9)
            region.close()

    monkeypatch.setattr(restore, "load", load_beside_the_other)
    other = manage(SmallState(), interval=100, **ASYNC)
    assert other.restore() == f"{other.root}/step-1"


def test_a_snapshot_of_another_generation_is_not_used(manage: Manage, mesh: Mesh) -> None:
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    steps(manager, state, mesh, 2)
    complete(manager, mesh)
    saver = saver_of(manager)
    start = manager._context.identity.generation_id
    assert saver.slots_to_keep(SnapshotOrigin(start, 2))
    assert not saver.slots_to_keep(SnapshotOrigin(start, 7))
    assert not saver.slots_to_keep(SnapshotOrigin("another", 2))
    crash(manager)
    state = SmallState(seed=1)
    manager = manage(state, interval=100, **ASYNC)
    assert manager.restore() == "step 2 in shared memory"
    steps(manager, state, mesh, 1)
    assert saver_of(manager).slots_to_keep(SnapshotOrigin(start, 2))


def test_a_snapshot_is_saved_even_if_memory_has_become_scarce(manage: Manage, mesh: Mesh) -> None:
    state = SmallState()
    manager = manage(state, interval=100, enable_first_step_checkpoint=False, **ASYNC)
    crash_after(manager, state, mesh, 2)
    state = SmallState(seed=1)
    manager = manage(state, interval=100, snapshot_gib=1e-9, **ASYNC)
    assert manager.restore() == "step 2 in shared memory"
    steps(manager, state, mesh, 1)
    assert "step-3" in steps_in(manager.root)


def test_an_earlier_generation_with_more_ranks_does_not_interfere(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    run_id = run_id_in(tmp_path)
    assert run_id is not None
    Region.create(shared_memory_folder(run_id), 1, {"world_size": 2}, 4096).close()
    assert manager.restore() is None
    steps(manager, state, mesh, 2)
    complete(manager, mesh)
    assert [path.name for path in memory_of(tmp_path)] == ["rank-00000.snapshots"]
    crash(manager)
    assert manage(SmallState(), **ASYNC).restore() == "step 2 in shared memory"


def test_a_damaged_later_checkpoint_does_not_hide_a_snapshot(
    manage: Manage, mesh: Mesh, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state, interval=5, **ASYNC)
    saver = first_step_saved(manager, state, mesh)
    steps(manager, state, mesh, 4)
    until(manager, mesh, lambda: saver.saved_step == 5, "step 5 is saved")
    crash(manager)
    path = Path(manager.root, "step-5", "rank-00000.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    # The run resumes from step 1, because shared memory was lost with the machine, and crashes
    # again at step 3.
    for region in memory_of(tmp_path):
        region.unlink()
    again = SmallState(seed=1)
    manager = manage(again, interval=5, **ASYNC)
    assert manager.restore() == f"{manager.root}/step-1"
    crash_after(manager, again, mesh, 2)
    third = SmallState(seed=2)
    assert manage(third, interval=5, **ASYNC).restore() == "step 3 in shared memory"
    assert same(third.tensors(), again.tensors())


def test_the_model_only_save_follows_the_one_in_progress(manage: Manage, mesh: Mesh) -> None:
    state = SmallState()
    settings = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    manager = manage(state, interval=3, **settings, **ASYNC)
    steps(manager, state, mesh, 3)
    folder = manager.final_save(finished=True)
    assert folder is not None and folder == f"{manager.root}/step-3"
    assert manifest_in(folder).model_only


def test_memory_corrupted_after_a_save_is_detected(
    manage: Manage, mesh: Mesh, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    first_step_saved(manager, state, mesh)
    crash(manager)
    (path,) = memory_of(tmp_path)
    region = Region.open(path, writable=True)
    (slot,) = [number for number, header in enumerate(region.slots()) if header.step == 1]
    region.data(slot)[5] ^= 1
    region.close()
    other = SmallState(seed=1)
    assert manage(other, interval=100, **ASYNC).restore() == f"{manager.root}/step-1"
    assert same(other.tensors(), state.tensors())
    assert any("is damaged: model.wide in slot" in warning for warning in warnings_in(logged))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("saves", [40, pytest.param(1000, marks=pytest.mark.matrix)])
def test_saves_leak_nothing_in_the_trainer(
    manage: Manage, mesh: Mesh, tmp_path: Path, saves: int
) -> None:
    state, me = SmallState(), psutil.Process()
    manager = manage(state, interval=1, keep_latest_k=2, **ASYNC)
    steps(manager, state, mesh, 1)
    saver = saver_of(manager)

    def save(number: int) -> tuple[int, int, int, int]:
        for _ in range(number):
            until(manager, mesh, lambda: saver.saved_step == state.step, "the step is saved")
            # Multiplied, because repeated additions would reach NaN.
            for tensor in state.tensors().values():
                tensor.zero_()
            steps(manager, state, mesh, 1)
        (memory,) = memory_of(tmp_path)
        in_memory = len(list(memory.parent.iterdir()))
        gc.collect()
        return me.num_fds(), me.num_threads(), len(me.children()), in_memory

    before = save(20)
    resident = me.memory_info().rss
    # Leftovers of other tests in this process may be freed in the meantime.
    after = save(saves)
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    # The C library keeps some memory; in the long row, each save adds a manifest.
    assert me.memory_info().rss - resident < 4 << 20
    until(manager, mesh, lambda: saver.saved_step == state.step, "the last step is saved")
    assert len([name for name in steps_in(manager.root) if name.startswith("step-")]) == 2


def test_a_hanging_writer_is_named_and_later_saves_check_it_again(
    manage: Manage, mesh: Mesh, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    crash_after(manager, state, mesh, 2)
    other = SmallState(seed=1)
    manager = manage(other, interval=2, preemption_grace_s=0.1, **ASYNC)
    assert manager.restore() == "step 2 in shared memory"
    (path,) = memory_of(tmp_path)
    lock = RankLock(path.parent, 0)
    assert lock.acquire(_STEPS_LATER_S)
    steps(manager, other, mesh, 2)
    warnings = [text for text in warnings_in(logged) if "is still running" in text]
    assert len(warnings) == 2 and f"process {os.getpid()} holds {lock.path}" in warnings[0]
    assert manager._asynchronous is None and "step-4" in steps_in(manager.root)
    lock.release()
    steps(manager, other, mesh, 1)
    assert manager._asynchronous is None, "no save is due"
    steps(manager, other, mesh, 1)
    saver = saver_of(manager)
    until(manager, mesh, lambda: saver.saved_step == 6, "step 6 is saved")
    assert steps_in(manager.root)[-2:] == ["step-4", "step-6"]


class _GrowingState(SmallState):
    """A state whose values may outgrow their reserved size."""

    notes = ""

    def values(self) -> dict[str, Any]:
        return super().values() | {"notes": self.notes}


@pytest.mark.parametrize("free_core", [True, False])
def test_values_that_outgrow_their_size_disable_snapshots_but_not_the_run(
    manage: Manage,
    mesh: Mesh,
    tmp_path: Path,
    logged: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    free_core: bool,
) -> None:
    monkeypatch.setattr("torchtitan_lite.checkpoint.copier.has_free_core", lambda: free_core)
    state = _GrowingState()
    manager = manage(state, interval=4, enable_first_step_checkpoint=False, **ASYNC)
    steps(manager, state, mesh, 2)
    complete(manager, mesh)
    state.notes = "x" * (2 << 20)
    steps(manager, state, mesh, 2)
    complete(manager, mesh)
    errors = [r.getMessage() for r in logged.records if r.levelname == "ERROR"]
    error = next(text for text in errors if "No snapshot" in text)
    assert "No snapshot of step 3: The values of a snapshot take 2" in error
    assert "has room for 1150976" in error
    # Larger memory is allocated, and the failed step is saved.
    steps(manager, state, mesh, 2)
    saver = saver_of(manager)
    assert not saver.needs_larger_region
    until(manager, mesh, lambda: saver.saved_step is not None, "a step is saved")
    complete(manager, mesh)
    crash(manager)
    other = _GrowingState(seed=1)
    assert manage(other, interval=100, **ASYNC).restore() == f"step {state.step} in shared memory"
    assert same(other.tensors(), state.tensors())


def test_values_that_outgrow_their_size_at_the_end_are_saved(manage: Manage, mesh: Mesh) -> None:
    state = _GrowingState()
    manager = manage(state, interval=100, **ASYNC)
    steps(manager, state, mesh, 2)
    state.notes = "x" * (2 << 20)
    assert manager.final_save(finished=True) == f"{manager.root}/step-2"
    assert manifest_in(f"{manager.root}/step-2").values["notes"] == state.notes


def test_waiting_for_a_hanging_writer_is_logged_repeatedly(
    manage: Manage,
    mesh: Mesh,
    logged: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchtitan_lite.checkpoint.async_saver._WARNING_S", 0.2)
    state = SmallState()
    manager = manage(state, interval=100, **ASYNC)
    steps(manager, state, mesh, 1)
    saver = saver_of(manager)
    assert saver._writer.pid is not None
    pid = saver._writer.pid
    os.kill(pid, signal.SIGSTOP)
    waiting = "Step 1 is still being saved in"

    def continues(record: logging.LogRecord) -> bool:
        # After the message was repeated.
        if any(waiting in text for text in warnings_in(logged)) and waiting in record.getMessage():
            os.kill(pid, signal.SIGCONT)
        return True

    logged.handler.addFilter(continues)
    started = time.monotonic()
    try:
        assert manager.final_save(finished=True) == f"{manager.root}/step-1"
    finally:
        logged.handler.removeFilter(continues)
    took_s = time.monotonic() - started
    output = [text for text in warnings_in(logged) if waiting in text]
    assert len(output) > 1
    waited_s = [int(text.partition("have waited for ")[2].split()[0]) for text in output]
    assert waited_s == sorted(waited_s) and waited_s[-1] <= took_s + 1
