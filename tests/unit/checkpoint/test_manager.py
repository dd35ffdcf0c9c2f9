"""When to save, what to resume from, and which checkpoints are kept."""

import errno
import pickle
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from tests.harness.threads import run_on_threads
from tests.unit.checkpoint.conftest import (
    Manage,
    SmallState,
    crash,
    manifest_in,
    run_id_in,
    run_steps,
    same,
    steps_in,
)
from torchtitan_lite.checkpoint import sync_saver
from torchtitan_lite.checkpoint import tensors as tensors_module
from torchtitan_lite.checkpoint.background.save import WriterGroup
from torchtitan_lite.checkpoint.history.snapshot_index import HeldPart, Position
from torchtitan_lite.checkpoint.restore import Restorer
from torchtitan_lite.checkpoint.save_context import RetryBackoff
from torchtitan_lite.checkpoint.shared_memory.folder import list_runs
from torchtitan_lite.checkpoint.storage.posix import LocalStorage
from torchtitan_lite.checkpoint.tensors import byte_pieces, cast_pieces
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint

_DATA = "rank-00000.safetensors"


def _truncate(folder: Path) -> None:
    content = (folder / _DATA).read_bytes()
    (folder / _DATA).write_bytes(content[:-1])


def _flip(folder: Path) -> None:
    first, _ = manifest_in(folder).tensors["model.weight"].boxes[0].bytes
    content = bytearray((folder / _DATA).read_bytes())
    content[first + 17] ^= 1
    (folder / _DATA).write_bytes(content)


def _remove(folder: Path) -> None:
    (folder / _DATA).unlink()


class _Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def _pickled(folder: Path) -> None:
    length = (folder / _DATA).stat().st_size
    content = pickle.dumps(_Bomb(folder.parent / "exploded"))
    (folder / _DATA).write_bytes(content.ljust(length, b"\0"))


def _pickled_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(pickle.dumps(_Bomb(folder.parent / "exploded")))


def _linked(name: str) -> Callable[[Path], None]:
    """Return a damage that moves a file elsewhere, and leaves a link to it."""

    def act(folder: Path) -> None:
        elsewhere = folder.parent / "elsewhere"
        (folder / name).rename(elsewhere)
        (folder / name).symlink_to(elsewhere)

    return act


_DAMAGES = {
    "truncated": (_truncate, rf"step-3/{_DATA} is damaged: .* should be in bytes"),
    "flipped": (_flip, rf"step-3/{_DATA} is damaged: the checksum of model.weight \(bytes"),
    "missing": (_remove, rf"step-3/{_DATA} is missing or cannot be read; it should hold"),
    "pickled": (_pickled, rf"step-3/{_DATA} is damaged: the checksum of"),
    "pickled manifest": (_pickled_manifest, r"step-3/manifest.json is damaged"),
    "link": (_linked(_DATA), rf"step-3/{_DATA} is a symbolic link out of the folder"),
    "linked manifest": (
        _linked("manifest.json"),
        r"step-3/manifest.json is a symbolic link out",
    ),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    manage: Manage, damage: str, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state)
    run_steps(manager, state, 2)
    expected = {name: tensor.clone() for name, tensor in state.tensors().items()}
    run_steps(manager, state, 1)
    act, message = _DAMAGES[damage]
    act(Path(manager.root, "step-3"))

    other = SmallState(seed=1)
    assert manage(other).restore() == f"{manager.root}/step-2"
    assert same(other.tensors(), expected)
    assert other.step == 2
    warnings = [r.getMessage() for r in logged.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert re.search(message, warnings[0])
    assert not Path(manager.root, "exploded").exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ETIMEDOUT])
def test_transient_read_errors_are_not_treated_as_damage(
    manage: Manage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Falling back to an older step would lose progress although the newest may be intact."""
    state = SmallState()
    run_steps(manage(state), state, 2)

    def fails(*_: object) -> None:
        raise OSError(number, "not now")

    monkeypatch.setattr(LocalStorage, "read_into", fails)
    with pytest.raises(CheckpointError, match=r"step-2/rank-00000.safetensors cannot .* not now"):
        manage(SmallState()).restore()
    monkeypatch.undo()
    manager = manage(SmallState())
    assert manager.restore() == f"{manager.root}/step-2"


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_explicit_checkpoint_stops_the_start(manage: Manage, damage: str) -> None:
    state = SmallState()
    manager = manage(state)
    run_steps(manager, state, 3)
    act, message = _DAMAGES[damage]
    act(Path(manager.root, "step-3"))
    other = SmallState(seed=1)
    with pytest.raises(DamagedCheckpoint, match=message):
        manage(other, load_step=3).restore()
    assert other.step == 0


def test_a_run_with_only_damaged_checkpoints_does_not_start_from_scratch(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state)
    run_steps(manager, state, 2)
    _flip(Path(manager.root, "step-1"))
    _truncate(Path(manager.root, "step-2"))
    with pytest.raises(DamagedCheckpoint, match=r"None of .* is intact: .*step-2.*step-1.*Delete"):
        manage(SmallState()).restore()


def test_a_run_without_checkpoints_starts_from_scratch(manage: Manage) -> None:
    assert manage(SmallState()).restore() is None


def test_a_missing_step_is_an_error_that_lists_existing_ones(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state)
    with pytest.raises(CheckpointError, match=r"load_step = 3, but .* holds the steps: none\."):
        manage(state, load_step=3).restore()
    with pytest.raises(CheckpointError, match=r"load_step = 0, but .* holds the steps: none\."):
        manage(state, load_step=0).restore()
    run_steps(manager, state, 2)
    with pytest.raises(CheckpointError, match=r"load_step = 3, but .* holds the steps: 1, 2\."):
        manage(state, load_step=3).restore()


@pytest.mark.parametrize(("step", "later"), [(3, []), (2, ["later steps than .*load_step = 2: 3"])])
def test_an_earlier_step_can_be_requested(
    manage: Manage, step: int, later: list[str], logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    first = manage(state)
    run_steps(first, state, 3)
    assert (first.newest_stored(), manage(state, enable=False).newest_stored()) == (3, -1)
    logged.clear()
    other = SmallState()
    manager = manage(other, load_step=step)
    manager.restore()
    assert (other.step, other.cursor, manager.stored_before) == (step, 8 * step, 3)
    warnings = [text for text in logged.messages if "later steps" in text]
    assert len(warnings) == len(later)
    assert all(re.search(*one) for one in zip(later, warnings, strict=True))


def test_the_newest_step_up_to_a_given_one_is_restored(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state)
    run_steps(manager, state, 3)
    folder = manager.restore_earlier(2, lambda saved: True)
    assert state.step == 2 and str(folder).endswith("step-2")


def test_of_one_step_the_snapshot_in_memory_comes_first() -> None:
    context: Any = SimpleNamespace(storage="disk")
    restorer: Any = SimpleNamespace(_context=context)
    leftover: Any = SimpleNamespace(saved=SimpleNamespace(step=2))
    found = Restorer._newest_first(restorer, [3, 2, 1], leftover)
    assert found == [("disk", "step-3"), leftover, ("disk", "step-2"), ("disk", "step-1")]


def test_the_next_snapshot_avoids_the_damage_of_all_ranks() -> None:
    def insert() -> tuple[list[Any], set[HeldPart]]:
        own = HeldPart(dist.get_rank(), False, Position(2, 16))
        leftover: Any = SimpleNamespace(
            damaged={own}, saved=SimpleNamespace(step=2), origin=SimpleNamespace(position="before")
        )
        following: Any = SimpleNamespace(saved=SimpleNamespace(step=1))
        restorer: Any = SimpleNamespace(_newest_leftover=lambda *given: following)
        remaining: list[Any] = [("disk", "step-2"), ("disk", "step-1"), ("disk", "step-0")]
        damaged: set[HeldPart] = set()
        Restorer._insert_next(restorer, remaining, leftover, damaged)
        return [one if one == following else one[1] for one in remaining], damaged

    for remaining, damaged in run_on_threads(2, insert):
        assert [one if isinstance(one, str) else "memory" for one in remaining] == [
            "step-2", "memory", "step-1", "step-0",
        ]  # fmt: skip
        assert {part.saver for part in damaged} == {0, 1}


def test_saves_at_the_interval_and_after_the_first_step_if_enabled(manage: Manage) -> None:
    for first, expected in ((False, ["step-3", "step-6"]), (True, ["step-1", "step-3", "step-6"])):
        state = SmallState()
        folder = f"first-{first}"
        settings = {"interval": 3, "folder": folder, "enable_first_step_checkpoint": first}
        manager = manage(state, **settings)
        run_steps(manager, state, 7)
        assert steps_in(manager.root) == expected


@pytest.mark.parametrize("settings", [{"enable": False}, {"load_only": True}])
def test_nothing_is_saved_when_checkpoints_are_disabled(
    manage: Manage, settings: dict[str, Any]
) -> None:
    state = SmallState()
    manager = manage(state, **settings)
    run_steps(manager, state, 2)
    assert manager.final_save(finished=True) is None
    assert not Path(manager.root).exists()


def test_exactly_the_newest_checkpoints_are_kept(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state, keep_latest_k=2)
    for step in range(1, 12):
        run_steps(manager, state, 1)
        kept = sorted(f"step-{s}" for s in (step - 1, step) if s > 0)
        assert steps_in(manager.root) == kept


def test_all_checkpoints_are_kept_without_a_limit(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state, keep_latest_k=0)
    run_steps(manager, state, 12)
    assert len(steps_in(manager.root)) == 12


def test_the_storage_is_closed_after_the_last_deletion(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    delete = LocalStorage.delete

    def slow_delete(*given: Any) -> None:
        time.sleep(0.1)
        delete(*given)
        calls.append("delete")

    monkeypatch.setattr(LocalStorage, "delete", slow_delete)
    monkeypatch.setattr(LocalStorage, "close", lambda self: calls.append("close"))
    state = SmallState()
    manager = manage(state, keep_latest_k=1)
    for _ in range(2):
        state.take_step()
        manager.after_step()
    manager.close()
    assert calls == ["delete", "close"]
    assert steps_in(manager.root) == ["step-2"]


def test_a_save_is_never_deleted_in_favor_of_a_damaged_later_one(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state, keep_latest_k=0)
    run_steps(manager, state, 4)
    _flip(Path(manager.root, "step-4"))
    _flip(Path(manager.root, "step-3"))
    _flip(Path(manager.root, "step-2"))
    # The run resumes from step 1, and stops after step 2 is saved again.
    state = SmallState()
    manager = manage(state, keep_latest_k=1)
    manager.restore()
    run_steps(manager, state, 1)
    assert "step-2" in steps_in(manager.root)
    other = SmallState()
    assert manage(other).restore() == f"{manager.root}/step-2"
    assert same(other.tensors(), state.tensors())


def test_an_interrupted_deletion_is_completed_by_the_next_start_that_saves(
    manage: Manage,
) -> None:
    state = SmallState()
    manager = manage(state, keep_latest_k=1)
    run_steps(manager, state, 2)
    for left in (".deleting-step-1", ".deleting-step-0"):
        Path(manager.root, left).mkdir()
        Path(manager.root, left, _DATA).write_bytes(b"left over")
    again = SmallState()
    manager = manage(again, keep_latest_k=1)
    assert manager.restore() == f"{manager.root}/step-2"
    run_steps(manager, again, 1)
    assert steps_in(manager.root) == ["step-3"]


def test_an_interrupted_replacement_is_repaired_by_the_next_start(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state)
    run_steps(manager, state, 2)
    Path(manager.root, "step-2").rename(Path(manager.root, ".replaced-step-2"))
    assert manage(SmallState()).restore() == f"{manager.root}/step-2"
    assert steps_in(manager.root) == ["step-1", "step-2"]


def test_an_interrupted_save_is_not_a_checkpoint_and_is_removed_by_the_next(
    manage: Manage,
) -> None:
    state = SmallState()
    manager = manage(state)
    run_steps(manager, state, 1)
    # The state after a kill just before the rename: complete, but not committed.
    Path(manager.root, "step-1").rename(Path(manager.root, ".writing-step-1-abc-1"))
    assert manage(SmallState()).restore() is None
    run_steps(manager, state, 1)
    assert steps_in(manager.root) == ["step-2"]


def test_training_continues_after_a_failed_save_but_the_last_save_must_succeed(
    manage: Manage, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state)
    Path(manager.root).write_text("a file where the folder should be")
    state.take_step()
    assert manager.after_step() > 0
    errors = [record.getMessage() for record in logged.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].startswith(f"Step 1 was not saved in {manager.root}: ")
    assert errors[0].endswith("Training continues.")
    with pytest.raises(CheckpointError, match="Step 1 was not saved"):
        manager.final_save(finished=True)
    Path(manager.root).unlink()
    assert manager.final_save(finished=True) == f"{manager.root}/step-1"


def test_a_failed_save_waits_until_all_replicas_have_the_same_state(
    manage: Manage, logged: pytest.LogCaptureFixture
) -> None:
    """Between two averages, the states of the replicas differ."""
    state = SmallState()
    manager = manage(state, interval=4, enable_first_step_checkpoint=False)
    root = Path(manager.root)

    def step(*, same_state: bool) -> None:
        state.take_step()
        manager.apply_signals(manager.local_signals())
        manager.set_writer_group(WriterGroup(0, 2, same_state=same_state))
        manager.after_step()

    for number in range(1, 5):
        if number == 4:
            root.write_text("a file where the folder should be")
        step(same_state=number == 4)
    assert [one for one in logged.records if "Step 4 was not saved" in one.getMessage()]
    root.unlink()
    for _ in range(2):
        step(same_state=False)
    assert not root.exists() or steps_in(root) == []
    step(same_state=True)
    assert steps_in(root) == ["step-7"]


@pytest.mark.parametrize("others_write", [True, False])
def test_the_first_replica_commits_once_the_others_have_written(
    manage: Manage,
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
    others_write: bool,
) -> None:
    states = [SmallState(), SmallState()]
    managers = [manage(state, replica=index) for index, state in enumerate(states)]
    for index, manager in enumerate(managers):
        manager.set_writer_group(WriterGroup(index, 2, "abc"))
        states[index].take_step()
    listed, late = LocalStorage.announced, threading.Thread(target=managers[1].after_step)

    def announced(*given: Any) -> list[str]:
        found = listed(*given)
        if others_write and late.ident is None:
            late.start()
        return found

    monkeypatch.setattr(LocalStorage, "announced", announced)
    monkeypatch.setattr(sync_saver, "_PATIENCE_S", 30.0 if others_write else 0.05)
    managers[0].after_step()
    assert steps_in(managers[0].root) == (["step-1"] if others_write else [])
    if others_write:
        late.join()
        restored = SmallState(seed=1)
        manage(restored).restore()
        assert same(restored.tensors(), states[0].tensors())
    else:
        assert any("writers [1] did not write" in one.getMessage() for one in logged.records)


def test_the_last_step_is_kept_without_the_other_replicas(manage: Manage) -> None:
    """They may have ended already."""
    state = SmallState()
    manager = manage(state, interval=100, enable_first_step_checkpoint=False, preemption_grace_s=1)
    manager.set_writer_group(WriterGroup(index=0, count=2, token="ab"))
    run_steps(manager, state, 1)
    manager.keep_last_step()
    assert steps_in(manager.root) == ["step-1"]


def test_an_unreadable_folder_is_named_at_the_start(manage: Manage) -> None:
    manager = manage(SmallState())
    Path(manager.root).write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"checkpoint cannot be used .*checkpoint.folder"):
        manager.restore()


def test_the_last_step_is_saved_once(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state, interval=2)
    run_steps(manager, state, 3)
    assert manager.final_save(finished=True) == f"{manager.root}/step-3"
    written = Path(manager.root, "step-3", "manifest.json").stat().st_ino
    manager.final_save(finished=True)
    restarted = manage(SmallState(), interval=2)
    restarted.restore()
    restarted.final_save(finished=True)
    assert Path(manager.root, "step-3", "manifest.json").stat().st_ino == written


def test_the_last_save_can_be_model_only_in_another_dtype(manage: Manage) -> None:
    state = SmallState()
    settings = {"last_save_model_only": True, "export_dtype": "bfloat16", "interval": 2}
    manager = manage(state, **settings)
    run_steps(manager, state, 2)
    assert len(manifest_in(f"{manager.root}/step-2").tensors) == 7
    folder = manager.final_save(finished=True)
    assert folder is not None
    manifest = manifest_in(folder)
    assert manifest.model_only and manifest.rng == {}
    assert manifest.values == {"train_state": {"step": 2}}
    with safe_open(Path(folder, _DATA), "pt") as file:
        names = file.keys()
        exported = {name: file.get_tensor(name) for name in names}
    assert same(
        exported,
        {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.model.items()},
    )
    with pytest.raises(CheckpointError, match="holds weights only, so training cannot resume"):
        manage(SmallState()).restore()


def test_a_finished_run_with_a_model_only_checkpoint_is_recognized(manage: Manage) -> None:
    state = SmallState()
    settings = {"last_save_model_only": True, "interval": 100}
    manager = manage(state, **settings)
    run_steps(manager, state, 2)
    folder = manager.final_save(finished=True)
    written = Path(str(folder), "manifest.json").stat().st_ino
    again = SmallState(seed=1)
    restarted = manage(again, last_step=2, **settings)
    assert restarted.restore() == folder
    assert again.step == 2 and torch.equal(again.model["model.weight"], state.model["model.weight"])
    assert restarted.final_save(finished=True) == folder
    assert Path(str(folder), "manifest.json").stat().st_ino == written
    with pytest.raises(CheckpointError, match="holds weights only, so training cannot resume"):
        manage(SmallState(), last_step=3, **settings).restore()
    elsewhere = {"folder": "elsewhere", "initial_load_path": folder}
    with pytest.raises(CheckpointError, match="holds weights only, so training cannot resume"):
        manage(SmallState(), last_step=2, initial_load_model_only=False, **elsewhere).restore()


def test_a_run_that_stops_early_saves_its_complete_state(manage: Manage) -> None:
    state = SmallState()
    manager = manage(state, last_save_model_only=True, interval=100)
    run_steps(manager, state, 2)
    folder = manager.final_save(finished=False)
    assert folder is not None and not manifest_in(folder).model_only
    other = SmallState()
    assert manage(other).restore() == folder
    assert other.step == 2


def test_parts_can_be_excluded_from_loading(manage: Manage) -> None:
    state = SmallState()
    run_steps(manage(state), state, 2)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    other, untouched = SmallState(seed=1), SmallState(seed=1)
    manage(other, exclude_from_loading=["model", "dataloader", "rng"]).restore()
    assert same(other.model, untouched.model)
    assert same(other.slots, state.slots)
    assert (other.step, other.cursor) == (2, 0)
    assert torch.equal(torch.rand(1), expected)

    other = SmallState(seed=1)
    manage(other, exclude_from_loading=["optimizer", "train_state"]).restore()
    assert same(other.tensors(), state.model)
    assert (other.step, other.cursor) == (0, 16)


@pytest.mark.parametrize("model_only", [True, False])
def test_another_run_can_be_the_start_until_this_one_has_its_own_checkpoint(
    manage: Manage, model_only: bool
) -> None:
    source = SmallState()
    elsewhere = manage(source, folder="elsewhere")
    run_steps(elsewhere, source, 2)
    settings = {
        "initial_load_path": f"{elsewhere.root}/step-2",
        "initial_load_model_only": model_only,
    }
    state = SmallState(seed=1)
    manager = manage(state, **settings)
    assert manager.restore() == f"{elsewhere.root}/step-2"
    assert same(state.model, source.model)
    assert state.step == (0 if model_only else 2)
    assert same(state.slots, {} if model_only else source.slots)
    manager.final_save(finished=False)
    assert steps_in(manager.root) == [f"step-{state.step}"]

    run_steps(manager, state, 1)
    again = SmallState()
    assert manage(again, **settings).restore() == f"{manager.root}/step-{state.step}"
    assert same(again.tensors(), state.tensors())


def test_a_model_only_checkpoint_can_start_another_run(manage: Manage) -> None:
    source = SmallState()
    elsewhere = manage(source, folder="elsewhere", last_save_model_only=True)
    run_steps(elsewhere, source, 1)
    folder = elsewhere.final_save(finished=True)
    state = SmallState(seed=1)
    manage(state, initial_load_path=folder).restore()
    assert torch.equal(state.model["model.weight"], source.model["model.weight"])


def test_a_missing_initial_checkpoint_is_an_error(manage: Manage, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-9 holds no manifest\.json"):
        manage(SmallState(), initial_load_path=str(tmp_path / "step-9")).restore()


def test_a_mismatched_model_stops_the_run_and_is_not_treated_as_damage(manage: Manage) -> None:
    state = SmallState()
    run_steps(manage(state), state, 2)
    other = SmallState()
    other.model["model.weight"] = torch.zeros(5, 8)
    with pytest.raises(CheckpointError, match=r"model.weight has .* expected \[5, 8\]") as error:
        manage(other).restore()
    assert not isinstance(error.value, DamagedCheckpoint)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_model_of_the_same_shapes_with_other_dims_is_rejected_by_name(
    manage: Manage, async_mode: str
) -> None:
    state = SmallState()
    dims = {"num_heads": 4, "rope_scaling": {"factor": 8.0}}
    settings: dict[str, Any] = {"async_mode": async_mode}
    manager = manage(state, dims=dims, **settings)
    run_steps(manager, state, 2)
    if async_mode == "async":
        # The newest state is in shared memory.
        crash(manager)
    for other, message in (
        ({"num_heads": 8, "rope_scaling": {"factor": 8.0}}, "num_heads is 4 there and 8 here"),
        (
            {"num_heads": 4, "rope_scaling": None},
            "rope_scaling is {'factor': 8.0} there and unset here",
        ),
        ({**dims, "rope_scaling": {"factor": 4.0}}, "rope_scaling.factor is 8.0 there and 4.0"),
    ):
        with pytest.raises(
            CheckpointError, match="has other model dimensions.*" + re.escape(message)
        ):
            manage(SmallState(), dims=other, **settings).restore()
    again = SmallState()
    # The implementation of a model may change, and unrecorded settings are not compared.
    dims = {"num_heads": 4, "attention_backend": "flex", "new": 1}
    assert manage(again, dims=dims, **settings).restore() is not None and again.step == 2


def test_weights_below_the_folder_of_the_run_are_of_another_run(
    manage: Manage, tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    manager = manage(state, dims={"num_heads": 4}, folder="checkpoint/pretrained")
    run_steps(manager, state, 1)
    path = f"{manager.root}/step-1"
    again = manage(SmallState(), dims={"num_heads": 8}, initial_load_path=path)
    assert again.restore() == path
    assert any("Training starts from its weights" in one.getMessage() for one in logged.records)


def test_a_checkpoint_without_dims_reports_that_only_shapes_were_compared(
    manage: Manage, caplog: pytest.LogCaptureFixture
) -> None:
    state = SmallState()
    run_steps(manage(state, async_mode="disabled"), state, 1)
    message = "does not record the dimensions of its model"
    for dims, count in (({}, 0), ({"num_heads": 4}, 1)):
        caplog.clear()
        manage(SmallState(), dims=dims, async_mode="disabled").restore()
        assert caplog.text.count(message) == count


def test_a_dtype_that_cannot_represent_the_weights_fails_the_last_save(manage: Manage) -> None:
    state = SmallState()
    state.model["model.weight"][0, 0] = 1e6
    manager = manage(state, last_save_model_only=True, export_dtype="float16", interval=100)
    run_steps(manager, state, 2)
    with pytest.raises(CheckpointError, match=r"model.weight has values that overflow .*: set"):
        manager.final_save(finished=True)


def test_a_run_with_synchronous_saves_leaves_nothing_in_memory(
    manage: Manage, tmp_path: Path
) -> None:
    state = SmallState()
    manager = manage(state)
    manager.restore()
    run_steps(manager, state, 1)
    manager.final_save(finished=True)
    assert run_id_in(tmp_path) not in [run.run_id for run in list_runs()]


def test_state_on_a_gpu_is_saved_piece_by_piece_with_the_same_bytes(
    manage: Manage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is on the CPU here; only the way of a GPU's state is taken."""
    files = []
    for place, is_on_cpu in enumerate([True, False]):
        monkeypatch.setattr(
            sync_saver, "_are_on_cpu", lambda tensors, is_on_cpu=is_on_cpu: is_on_cpu
        )
        monkeypatch.setattr(tensors_module, "_PIECE_BYTES", 64)
        folder = tmp_path / str(place)
        state = SmallState()
        run_steps(manage(state, dump_folder=folder), state, 1)
        found = sorted((folder / "checkpoint" / "step-1").glob("*.safetensors"))
        files.append({path.name: path.read_bytes() for path in found})
        restored = SmallState(seed=1)
        manage(restored, dump_folder=folder).restore()
        assert same(restored.tensors(), state.tensors())
    assert files[0] and files[0] == files[1]


def test_pieces_of_a_tensor_are_bounded() -> None:
    tensor = torch.arange(5 << 20)
    pieces = list(byte_pieces(tensor, 24, 38 << 20))
    assert b"".join(pieces) == tensor.numpy().tobytes()[24 : 24 + (38 << 20)]
    assert max(map(len, pieces)) == 8 << 20


def test_a_tensor_is_cast_in_bounded_pieces() -> None:
    tensor = torch.arange((10 << 20) + 3, dtype=torch.float32)
    pieces = list(cast_pieces("weight", tensor, torch.bfloat16))
    assert b"".join(pieces) == bytes(tensor.bfloat16().view(torch.uint8).numpy())
    assert max(map(len, pieces)) == 8 << 20


def test_failures_are_counted_until_a_save_succeeds() -> None:
    backoff = RetryBackoff()
    for first in (0, 100):
        for step, waits in ((first, 1), (first + 1, 2), (first + 3, 4)):
            backoff.failed(step)
            assert backoff.may_retry(step + waits) and not backoff.may_retry(step + waits - 1)
        assert backoff.consecutive_failures == 3
        backoff.succeeded()
        assert backoff.consecutive_failures == 0


def test_leftovers_are_removed_by_the_first_save_only(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of later saves are of this run."""
    generation_ids: list[str] = []
    state = SmallState()
    manager = manage(state)
    monkeypatch.setattr(
        sync_saver.attempts,
        "recover",
        lambda _, generation_id: generation_ids.append(generation_id),
    )
    run_steps(manager, state, 3)
    assert generation_ids == [manager._context.identity.generation_id]
