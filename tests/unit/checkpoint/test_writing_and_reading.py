"""The files of a checkpoint: they are read back bitwise, or not at all."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import Shard

from tests.unit.checkpoint.conftest import (
    Manage,
    SmallState,
    manifest_in,
    run_steps,
    same,
    steps_in,
)
from tests.unit.checkpoint.small_checkpoint import TWO_FILES, replace_manifest, write_checkpoint
from torchtitan_lite.checkpoint.loading import load
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.core import rng
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, layout_to_json


@pytest.fixture
def saved(manage: Manage) -> Path:
    """A checkpoint of step 1."""
    state = SmallState()
    manager = manage(state)
    run_steps(manager, state, 1)
    return Path(manager.root, "step-1")


def test_everything_is_restored_bitwise(manage: Manage) -> None:
    state = SmallState(seed=1)
    run_steps(manage(state), state, 3)
    other = SmallState(seed=2)
    folder = manage(other).restore()
    assert folder is not None and folder.endswith("/step-3")
    assert same(other.tensors(), state.tensors())
    assert len(other.slots) == 2
    assert (other.step, other.cursor) == (3, 24)


def test_the_ambient_generators_are_restored(manage: Manage) -> None:
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


def test_the_manifest_describes_the_run(saved: Path) -> None:
    manifest = manifest_in(saved)
    assert manifest.step == 1 and not manifest.model_only
    assert manifest.mesh == asdict(ParallelDims())
    assert manifest.config == {"seed": 1}
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.values["dataloader"] == {"cursor": 8}


def test_a_changed_dtype_is_converted(manage: Manage) -> None:
    state = SmallState()
    run_steps(manage(state), state, 1)
    other = SmallState(seed=1)
    other.model["model.wide"] = other.model["model.wide"].float()
    manage(other).restore()
    assert torch.equal(other.model["model.wide"], state.model["model.wide"].float())


def test_saving_the_same_step_again_replaces_it(manage: Manage) -> None:
    for value in (1.0, 2.0):
        state = SmallState()
        state.model["model.wide"].fill_(value)
        manager = manage(state)
        manager.final_save(finished=False)
    assert steps_in(manager.root) == ["step-0"]
    with safe_open(Path(manager.root, "step-0", "rank-00000.safetensors"), "pt") as file:
        assert file.get_tensor("model.wide").unique().tolist() == [2.0]


def test_a_failed_save_leaves_nothing_behind(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable:
        def __repr__(self) -> str:
            return "unreadable"

    state = SmallState()
    monkeypatch.setattr(state, "values", lambda: {"dataloader": Unreadable()})
    manager = manage(state)
    with pytest.raises(CheckpointError, match=r"Step 0 was not saved in .*: .*Error: "):
        manager.final_save(finished=False)
    assert steps_in(manager.root) == []


def test_a_folder_is_a_checkpoint_once_its_manifest_exists(saved: Path) -> None:
    root = saved.parent
    for name in ("step-2", "step-x", "step-007", ".writing-step-3-abc-1", "step-10"):
        (root / name).mkdir()
    for name in ("step-x", "step-007", ".writing-step-3-abc-1", "step-10"):
        (root / name / "manifest.json").write_text("{}")
    (root / "step-7").write_text("a file")
    assert open_storage(str(root)).steps() == [1, 10]
    assert open_storage(str(root / "nothing")).steps() == []


def test_a_checkpoint_of_another_mesh_loads(mesh: Mesh, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, step=3)
    expected = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    snapshot = StoredSnapshot(open_storage(str(tmp_path)), "step-3")
    assert snapshot.saved.mesh["dp_shard"] == 2
    load(snapshot, expected, {"model", "optimizer"}, mesh)
    assert same(expected, tensors)


def test_all_mismatched_tensors_are_listed(saved: Path, mesh: Mesh) -> None:
    state = SmallState(seed=1)
    state.take_step()
    tensors = state.tensors()
    tensors["model.weight"] = torch.ones(5, 8)
    tensors["model.other"] = tensors.pop("model.wide")
    tensors["model.new"] = tensors.pop("model.narrow")
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    snapshot = StoredSnapshot(open_storage(str(saved.parent)), saved.name)
    with pytest.raises(CheckpointError) as error:
        load(snapshot, tensors, {"model", "optimizer"}, mesh)
    assert not isinstance(error.value, DamagedCheckpoint)
    output = str(error.value)
    assert f"{saved} does not fit this run (5 tensors): " in output
    for problem in (
        "model.weight has shape [5, 7]; expected [5, 8]",
        "model.other is missing",
        "model.new is missing",
        "model.wide is unexpected",
        "model.narrow is unexpected",
    ):
        assert problem in output
    assert same(tensors, before)


def _box(raw: dict[str, Any], name: str = "model.weight", number: int = 0) -> dict[str, Any]:
    return raw["tensors"][name]["boxes"][number]


def _layout(raw: dict[str, Any]) -> dict[str, Any]:
    return raw["layouts"][raw["tensors"]["model.weight"]["layout"]]


def _escape(raw: dict[str, Any]) -> None:
    _box(raw)["file"] = "../../other.safetensors"


def _absolute(raw: dict[str, Any]) -> None:
    _box(raw)["file"] = "/etc/passwd"


def _new_line(raw: dict[str, Any]) -> None:
    _box(raw)["file"] += "\n"


def _data_outside(raw: dict[str, Any]) -> None:
    raw["data"] = ".."


def _data_below(raw: dict[str, Any]) -> None:
    raw["data"] = "a/b"


def _data_new_line(raw: dict[str, Any]) -> None:
    raw["data"] = "a\n"


def _data_in_no_file(raw: dict[str, Any]) -> None:
    raw["data"] = ""


def _data_in_version_2(raw: dict[str, Any]) -> None:
    raw |= {"version": 2, "data": "a-0"}


def _absurd_shape(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.weight"]["shape"] = [1 << 61, 1 << 61]
    _box(raw)["size"] = [1 << 61, 1 << 61]


def _absurd_dims(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.weight"]["shape"] = [(1 << 62) - 1] * 300_000


def _beyond_integers(raw: dict[str, Any]) -> None:
    _box(raw)["bytes"] = [0, 1 << 70]


def _negative(raw: dict[str, Any]) -> None:
    _box(raw)["offset"] = [-1, 0]


def _outside(raw: dict[str, Any]) -> None:
    _box(raw)["offset"] = [151, 0]


def _share_bytes(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.copy"] = raw["tensors"]["model.weight"]


def _half(raw: dict[str, Any]) -> None:
    first, _ = _box(raw)["bytes"]
    _box(raw)["size"], _box(raw)["bytes"] = [2, 7], [first, first + 2 * 7 * 4]


def _overlap(raw: dict[str, Any]) -> None:
    _box(raw, number=1)["offset"] = [0, 0]


def _many_boxes(raw: dict[str, Any]) -> None:
    """Boxes of one element each: comparing all pairs would take gigabytes."""
    first = _box(raw)
    raw["tensors"]["model.many"] = raw["tensors"]["model.weight"] | {
        "shape": [20_000],
        "boxes": [
            first | {"offset": [at], "size": [1], "bytes": [4 * at, 4 * at + 4]}
            for at in range(20_000)
        ],
    }


def _beyond_the_file(raw: dict[str, Any]) -> None:
    first, end = _box(raw)["bytes"]
    _box(raw)["bytes"] = [first + 100_000, end + 100_000]


def _unknown_dtype(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.weight"]["dtype"] = "PICKLE"


def _unknown_key(raw: dict[str, Any]) -> None:
    raw["import"] = "os"


def _text_for_a_number(raw: dict[str, Any]) -> None:
    raw["step"] = "3"


def _another_step(raw: dict[str, Any]) -> None:
    raw["step"] = 4


def _no_such_layout(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.weight"]["layout"] = 2


def _negative_layout(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.weight"]["layout"] = -1


def _layout_of_a_file_outside(raw: dict[str, Any]) -> None:
    _layout(raw)["mesh"]["holders"][0] = "../../other.safetensors"


def _layout_of_more_files(raw: dict[str, Any]) -> None:
    _layout(raw)["mesh"] |= {"shape": [3], "holders": [*TWO_FILES, "rank-00002.safetensors"]}


def _layout_reversed(raw: dict[str, Any]) -> None:
    _layout(raw)["mesh"]["holders"].reverse()


def _layout_of_other_boxes(raw: dict[str, Any]) -> None:
    _layout(raw)["placements"] = ["S1"]


def _layout_of_replicas(raw: dict[str, Any]) -> None:
    """The files are declared as replicas, but only one of them has the data."""
    _layout(raw)["placements"] = ["R"]
    entry = raw["tensors"]["model.weight"]
    full = entry["boxes"][0]
    first, _ = full["bytes"]
    entry["shape"], entry["boxes"] = [150, 7], [full | {"bytes": [first, first + 150 * 7 * 4]}]


def _layout_of_partial_sums(raw: dict[str, Any]) -> None:
    _layout_of_replicas(raw)
    _layout(raw)["placements"] = ["P(sum)"]


def _strided_layout(raw: dict[str, Any]) -> None:
    _layout(raw)["placements"] = ["S0/9999999999"]


def _layout_of_absurdly_many(raw: dict[str, Any]) -> None:
    _layout(raw)["mesh"]["shape"] = [1 << 61]


def _layout_of_many(raw: dict[str, Any]) -> None:
    names = [f"rank-{rank:05d}.safetensors" for rank in range(100_000)]
    _layout(raw)["mesh"] |= {"shape": [100_000], "holders": names}


def _layout_that_repeats(raw: dict[str, Any]) -> None:
    _layout_of_many(raw)
    _layout(raw)["mesh"]["holders"][-1] = "rank-99998.safetensors"


def _layout_of_many_axes(raw: dict[str, Any]) -> None:
    mesh = _layout(raw)["mesh"]
    mesh["shape"] += [1] * 50_000
    mesh["axes"] += [f"axis{number}" for number in range(50_000)]
    _layout(raw)["placements"] += ["R"] * 50_000


def _layout_of_nonsense(raw: dict[str, Any]) -> None:
    _layout(raw)["placements"] = ["__import__('os')"]


def _layout_of_more_dims(raw: dict[str, Any]) -> None:
    """Of a tensor without elements, which no file has."""
    raw["layouts"].append({**_layout(raw), "placements": ["S1"]})
    entry = {"dtype": "F32", "shape": [0], "layout": len(raw["layouts"]) - 1, "boxes": []}
    raw["tensors"]["model.none"] = entry


def _lone_surrogate(raw: dict[str, Any]) -> None:
    raw["tensors"]["model.\ud800"] = raw["tensors"].pop("model.weight")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_escape, r"damaged at tensors.model.weight.boxes.0.file: String should"),
        (_absolute, r"damaged at tensors.model.weight.boxes.0.file: String should"),
        (_new_line, r"damaged at tensors.model.weight.boxes.0.file: String should"),
        (_data_outside, r"damaged at data: String should match"),
        (_data_below, r"damaged at data: String should match"),
        (_data_new_line, r"damaged at data: String should match"),
        (_data_in_no_file, r"damaged at data: String should match"),
        (_data_in_version_2, r"version 2 has no field data"),
        (_absurd_shape, r"the box of model.weight .* does not fit"),
        (_absurd_dims, r"damaged at tensors.model.weight.shape: List should have at most"),
        (
            _beyond_integers,
            r"damaged at tensors.model.weight.boxes.0.bytes.1: Input should be less",
        ),
        (_negative, r"damaged at tensors.model.weight.boxes.0.offset.0: Input should be greater"),
        (_outside, r"the box of model.weight at \[151, 0\] of size \[150, 7\] does not fit shape"),
        (_share_bytes, r"rank-0000..safetensors is damaged: model.(copy|weight) should be in"),
        (_half, r"the boxes of model.weight hold 1064 of 2100 elements"),
        (_overlap, r"model.weight holds other boxes .*\[0, 0\]"),
        (_many_boxes, r"model.many holds other boxes"),
        (_beyond_the_file, r"rank-00000.safetensors is damaged: model.weight should be in bytes"),
        (_unknown_dtype, r"the box of model.weight .* does not fit .*PICKLE"),
        (_unknown_key, r"manifest.json is damaged at import: Extra inputs"),
        (_text_for_a_number, r"manifest.json is damaged at step: Input should be a valid integer"),
        (_another_step, r"is of step 4"),
        (_no_such_layout, r"model.weight has layout 2, and there are 2"),
        (_negative_layout, r"damaged at tensors.model.weight.layout: Input should be greater"),
        (_layout_of_a_file_outside, r"layout 0 names '\.\./\.\./other\.safetensors'"),
        (_layout_of_more_files, r"model.weight holds other boxes"),
        (_layout_reversed, r"model.weight holds other boxes"),
        (_layout_of_other_boxes, r"model.weight holds other boxes"),
        (_layout_of_replicas, r"model.weight .* elements that several files hold"),
        (_layout_of_partial_sums, r"model.weight .* elements that several files hold"),
        (_strided_layout, r"layout 0 .* strided"),
        (_layout_of_absurdly_many, r"layout 0: A mesh of shape .* needs 2305843009213693952"),
        (_layout_of_many, r"model.weight holds other boxes"),
        (_layout_that_repeats, r"layout 0: Holder rank-99998.safetensors is twice"),
        (_layout_of_many_axes, r"layout 0 .*has 50001 axes"),
        (_layout_of_nonsense, r"layout 0: .* is not a valid placement"),
        (_layout_of_more_dims, r"shards dim 1 over .* has 1 dims"),
        (_lone_surrogate, r"manifest.json is damaged at tensors.* not a printable name"),
    ],
)
def test_an_inconsistent_manifest_is_rejected_quickly(
    tmp_path: Path, make: Callable[[dict[str, Any]], None], message: str
) -> None:
    write_checkpoint(tmp_path, step=3)
    folder = tmp_path / "step-3"
    raw = json.loads((folder / "manifest.json").read_text())
    make(raw)
    # With a new checksum, because a wrong one would be detected first.
    replace_manifest(folder, raw)
    started, peak_kib = time.process_time(), getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedCheckpoint, match=message) as error:
        StoredSnapshot(open_storage(str(tmp_path)), "step-3")
    assert time.process_time() - started < 5
    assert getrusage(RUSAGE_SELF).ru_maxrss - peak_kib < 200 << 10
    # Ranks exchange the manifest.
    assert len(str(error.value).encode()) < 2000


@pytest.mark.parametrize("depth", [500, 900, 940, 960, 980, 990, 100_000])
def test_a_manifest_of_any_depth_is_read_or_rejected(saved: Path, depth: int) -> None:
    path = saved / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('"peak_lr": 0.1', f'"peak_lr": {"[" * depth}{"]" * depth}'))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
        manifest_in(saved)


def test_a_changed_value_is_detected_by_the_manifests_checksum(saved: Path) -> None:
    path = saved / "manifest.json"
    text = path.read_text()
    assert '"cursor": 8' in text
    path.write_text(text.replace('"cursor": 8', '"cursor": 9'))
    with pytest.raises(DamagedCheckpoint, match="its own checksum does not match"):
        manifest_in(saved)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\x80\x04\x95\xff", b"[" * 100_000, b"1" * 5_000]
)
def test_a_malformed_manifest_is_rejected(saved: Path, content: bytes) -> None:
    (saved / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
        manifest_in(saved)


def test_a_folder_without_a_manifest_is_not_a_checkpoint(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"no manifest\.json, so it is not a complete"):
        manifest_in(saved)


def test_a_tensor_without_elements_may_have_a_layout_of_ranks(saved: Path) -> None:
    raw = json.loads((saved / "manifest.json").read_text())
    ranks = Layout(HolderMesh((2,), (0, 1), ("dp_shard",)), [Shard(0)])
    raw["layouts"].append(layout_to_json(ranks))
    entry = {"dtype": "F32", "shape": [0, 4], "layout": len(raw["layouts"]) - 1, "boxes": []}
    raw["tensors"]["model.none"] = entry
    replace_manifest(saved, raw)
    assert manifest_in(saved).tensors["model.none"].boxes == []


def test_format_2_is_read(saved: Path) -> None:
    raw = json.loads((saved / "manifest.json").read_text())
    replace_manifest(saved, raw | {"version": 2})
    assert manifest_in(saved).version == 2


@pytest.mark.parametrize("version", [1, 4, "3", None])
def test_another_version_is_distinguished_from_damage(saved: Path, version: object) -> None:
    path = saved / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"version": version, "new": "keys"}))
    expected = f"has format version {version}; this version of torchtitan_lite reads 2 and 3"
    with pytest.raises(CheckpointError, match=expected) as got:
        manifest_in(saved)
    assert not isinstance(got.value, DamagedCheckpoint)
