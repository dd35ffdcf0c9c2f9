"""The files of a checkpoint: what is written comes back bit by bit, or not at all."""

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open

from tests.unit.checkpoint.conftest import Manage, SmallState, run_steps, same, steps_in
from torchtitan_lite import rng
from torchtitan_lite.checkpoint.manifest import Manifest, read_manifest, step_folders
from torchtitan_lite.checkpoint.reader import check_fit
from torchtitan_lite.checkpoint.writer import write_checkpoint
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.mesh import Degrees, Mesh


@pytest.fixture
def saved(manage: Manage) -> Path:
    """A checkpoint of step 1."""
    state = SmallState()
    manager = manage(state)
    run_steps(manager, state, 1)
    return manager.root / "step-1"


def test_everything_comes_back_bit_by_bit(manage: Manage) -> None:
    state = SmallState(seed=1)
    run_steps(manage(state), state, 3)
    other = SmallState(seed=2)
    folder = manage(other).restore()
    assert folder is not None and folder.name == "step-3"
    assert same(other.tensors(), state.tensors())
    assert len(other.slots) == 2
    assert (other.step, other.cursor) == (3, 24)


def test_the_ambient_generators_come_back(manage: Manage) -> None:
    before = rng.capture()
    try:
        state = SmallState()
        run_steps(manage(state), state, 1)
        expected = (random.random(), torch.rand(2).tolist())
        manage(SmallState()).restore()
        assert (random.random(), torch.rand(2).tolist()) == expected
    finally:
        rng.restore(before)


def test_other_programs_can_read_the_files(saved: Path) -> None:
    assert steps_in(saved) == ["manifest.json", "rank-00000.safetensors"]
    state = SmallState()
    state.take_step()
    with safe_open(saved / "rank-00000.safetensors", "pt") as file:
        names = file.keys()
        assert same({name: file.get_tensor(name) for name in names}, state.tensors())


def test_the_manifest_says_what_it_is_of(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest.step == 1 and not manifest.model_only
    assert manifest.mesh == asdict(Degrees())
    assert manifest.config == {"seed": 1}
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.values["dataloader"] == {"cursor": 8}


def test_a_dtype_that_changed_is_converted(manage: Manage) -> None:
    state = SmallState()
    run_steps(manage(state), state, 1)
    other = SmallState(seed=1)
    other.model["model.wide"] = other.model["model.wide"].float()
    manage(other).restore()
    assert torch.equal(other.model["model.wide"], state.model["model.wide"].float())


def test_saving_the_same_step_again_replaces_it(mesh: Mesh, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        folder = write_checkpoint(
            tmp_path, step=4, tensors={"model.w": torch.full((2,), value)}, values={}, config={},
            mesh=mesh,
        )  # fmt: skip
    assert steps_in(tmp_path) == ["step-4"]
    with safe_open(folder / "rank-00000.safetensors", "pt") as file:
        assert file.get_tensor("model.w").tolist() == [2.0, 2.0]


def test_a_save_that_fails_leaves_nothing_behind(mesh: Mesh, tmp_path: Path) -> None:
    class Unreadable:
        def __repr__(self) -> str:
            return "unreadable"

    with pytest.raises(CheckpointError, match=r"step 4 was not saved in .*: .*Error: "):
        write_checkpoint(
            tmp_path, step=4, tensors={"model.w": torch.ones(2)},
            values={"dataloader": Unreadable()}, config={}, mesh=mesh,
        )  # fmt: skip
    assert steps_in(tmp_path) == []


def test_a_folder_is_a_checkpoint_once_its_manifest_is_there(saved: Path) -> None:
    root = saved.parent
    for name in ("step-2", "step-x", ".writing-step-3", "step-10"):
        (root / name).mkdir()
    for name in ("step-x", ".writing-step-3", "step-10"):
        (root / name / "manifest.json").write_text("{}")
    (root / "step-7").write_text("a file")
    assert list(step_folders(root)) == [1, 10]
    assert step_folders(root / "nothing") == {}


def _box(raw: dict[str, Any], name: str = "model.weight") -> dict[str, Any]:
    return raw["tensors"][name]["boxes"][0]


def _escape(raw: dict[str, Any]) -> None:
    _box(raw)["file"] = "../../other.safetensors"


def _absolute(raw: dict[str, Any]) -> None:
    _box(raw)["file"] = "/etc/passwd"


def _absurd_shape(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.weight"]["shape"] = [1 << 61, 1 << 61]
    _box(raw)["size"] = [1 << 61, 1 << 61]


def _beyond_integers(raw: dict[str, Any]) -> None:
    _box(raw)["bytes"] = [0, 1 << 70]


def _negative(raw: dict[str, Any]) -> None:
    _box(raw)["offset"] = [-1, 0]


def _outside(raw: dict[str, Any]) -> None:
    _box(raw)["offset"] = [1, 0]


def _share_bytes(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.copy"] = raw["tensors"]["model.weight"]


def _half(raw: dict[str, Any]) -> None:
    first, _ = _box(raw)["bytes"]
    _box(raw)["size"], _box(raw)["bytes"] = [2, 7], [first, first + 2 * 7 * 4]


def _beyond_the_file(raw: dict[str, Any]) -> None:
    first, end = _box(raw)["bytes"]
    _box(raw)["bytes"] = [first + 10_000, end + 10_000]


def _unknown_dtype(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.weight"]["dtype"] = "PICKLE"


def _unknown_key(raw: dict[str, Any]) -> None:
    raw["import"] = "os"


def _text_for_a_number(raw: dict[str, Any]) -> None:
    raw["step"] = "1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_escape, r"manifest.json is damaged at tensors.model.weight.boxes.0.file: String should"),
        (
            _absolute,
            r"manifest.json is damaged at tensors.model.weight.boxes.0.file: String should",
        ),
        (_absurd_shape, r"the box of model.weight .* does not fit"),
        (
            _beyond_integers,
            r"damaged at tensors.model.weight.boxes.0.bytes.1: Input should be less",
        ),
        (_negative, r"damaged at tensors.model.weight.boxes.0.offset.0: Input should be greater"),
        (_outside, r"the box of model.weight at \[1, 0\] of size \[5, 7\] does not fit shape"),
        (_share_bytes, r"rank-00000.safetensors is damaged: model.(copy|weight) should lie in"),
        (_half, r"the boxes of model.weight hold 14 of 35 elements"),
        (_beyond_the_file, r"rank-00000.safetensors is damaged: model.weight should lie in bytes"),
        (_unknown_dtype, r"the box of model.weight .* does not fit .*PICKLE"),
        (_unknown_key, r"manifest.json is damaged at import: Extra inputs"),
        (_text_for_a_number, r"manifest.json is damaged at step: Input should be a valid integer"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    read_manifest(saved)
    path = saved / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw)
    # Signed again, since its own checksum would be found wrong first.
    with contextlib.suppress(ValidationError):
        raw["xxh3"] = Manifest.model_validate(raw).checksum()
    path.write_text(json.dumps(raw))
    with pytest.raises(DamagedCheckpoint, match=message):
        read_manifest(saved)


def test_a_changed_value_is_found_by_the_manifests_own_checksum(saved: Path) -> None:
    path = saved / "manifest.json"
    text = path.read_text()
    assert '"cursor": 8' in text
    path.write_text(text.replace('"cursor": 8', '"cursor": 9'))
    with pytest.raises(DamagedCheckpoint, match="its own checksum does not hold"):
        read_manifest(saved)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\x80\x04\x95\xff", b"[" * 100_000, b"1" * 5_000]
)
def test_a_manifest_that_is_no_manifest_is_refused(saved: Path, content: bytes) -> None:
    (saved / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
        read_manifest(saved)


def test_a_folder_without_a_manifest_is_no_checkpoint(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"holds no manifest\.json, so it is no complete"):
        read_manifest(saved)


def test_a_later_version_is_told_apart_from_damage(saved: Path) -> None:
    path = saved / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"version": 2, "new": "keys"}))
    with pytest.raises(CheckpointError, match="has format version 2; this version reads 1") as got:
        read_manifest(saved)
    assert not isinstance(got.value, DamagedCheckpoint)


def test_tensors_that_do_not_fit_are_all_listed(saved: Path) -> None:
    tensors = SmallState().tensors()
    tensors["model.weight"] = torch.ones(5, 8)
    tensors["model.other"] = torch.ones(1)
    with pytest.raises(CheckpointError) as error:
        check_fit(read_manifest(saved), saved, tensors)
    assert "model.weight has shape [5, 8], saved [5, 7]" in str(error.value)
    assert "model.other is not in the checkpoint" in str(error.value)


def test_a_checkpoint_of_another_mesh_is_refused_with_both(saved: Path) -> None:
    manifest = read_manifest(saved)
    entry = manifest.tensors["model.weight"]
    box = entry.boxes[0]
    halves = [
        box.model_copy(update={"offset": [0, 0], "size": [3, 7]}),
        box.model_copy(update={"offset": [3, 0], "size": [2, 7]}),
    ]
    cut = manifest.model_copy(
        update={
            "mesh": manifest.mesh | {"dp_shard": 2},
            "tensors": manifest.tensors
            | {"model.weight": entry.model_copy(update={"boxes": halves})},
        }
    )
    with pytest.raises(CheckpointError) as error:
        check_fit(cut, saved, SmallState().tensors())
    assert not isinstance(error.value, DamagedCheckpoint)
    mesh = "pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 1 x ep 1 x etp 1"
    assert f"another mesh ({mesh}): 1 of 5 tensors" in str(error.value)
    assert "such as model.weight" in str(error.value)
