"""Damage to a small checkpoint of two files: loads and checks detect all of it."""

import os
import random
import secrets
import shutil
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.conftest import same
from tests.unit.checkpoint.small_checkpoint import TWO_FILES, damage_file, write_checkpoint
from torchtitan_lite.checkpoint.loading import load
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.checkpoint.storage.object_store import ObjectStore
from torchtitan_lite.checkpoint.verification import verify
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.distributed.mesh import Mesh


def _loaded(root: Path | str, like: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    storage = open_storage(str(root))
    try:
        load(StoredSnapshot(storage, "step-3"), tensors, {"model", "optimizer"}, mesh)
    finally:
        storage.close()
    return tensors


@pytest.mark.parametrize(
    "number", [pytest.param(100, id="100"), pytest.param(1000, id="1000", marks=pytest.mark.matrix)]
)
def test_all_damage_is_detected_and_the_file_named(
    tmp_path: Path, mesh: Mesh, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    full, root = tmp_path / "whole", tmp_path / "damaged"
    tensors = write_checkpoint(full, step=3)
    assert same(_loaded(full, tensors, mesh), tensors)
    assert verify(open_storage(str(full)), "step-3") == []
    rng = random.Random(0)
    unseen = 0
    for count in range(number):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(full, root)
        file, what = damage_file(root / "step-3", rng)
        case = f"damage {count}: {file} {what}"
        caplog.clear()
        try:
            actual = _loaded(root, tensors, mesh)
        except CheckpointError as error:
            missing = file == "manifest.json" and what == "deleted"
            assert (file if not missing else "holds no manifest.json") in str(error), case
            rejected = True
        else:
            # A load does not need the headers of safetensors files: the manifest has everything.
            assert same(actual, tensors), case
            rejected = False
        try:
            seen = verify(open_storage(str(root)), "step-3")
        except CheckpointError as error:
            assert not isinstance(error, DamagedCheckpoint) and "format version" in str(error), case
            continue
        assert {one.file for one in seen} in ({file}, set()), case
        assert seen or not rejected, case
        assert rejected or bool(seen) == (f"{file} is damaged beside its tensors" in caplog.text)
        unseen += not seen
    # For example, 1e-05 instead of 1E-05 in a manifest: the same value in another spelling.
    assert unseen <= number // 100


def test_all_damaged_tensors_are_named(tmp_path: Path, mesh: Mesh) -> None:
    tensors = write_checkpoint(tmp_path, step=3)
    storage = open_storage(str(tmp_path))
    manifest = StoredSnapshot(storage, "step-3").manifest
    hit = {}
    for name in ("model.weight", "optimizer.weight.momentum"):
        box = manifest.tensors[name].boxes[1]
        path = tmp_path / "step-3" / box.file
        content = bytearray(path.read_bytes())
        content[box.bytes[1] - 1] ^= 64
        path.write_bytes(content)
        hit[name] = box.file
    storage.close()
    with pytest.raises(DamagedCheckpoint, match=rf"{TWO_FILES[1]} is damaged: .* of model.weight"):
        _loaded(tmp_path, tensors, mesh)
    assert {one.tensor: one.file for one in verify(storage, "step-3")} == hit
    (tmp_path / "step-3" / TWO_FILES[0]).unlink()
    actual = verify(open_storage(str(tmp_path)), "step-3")
    assert {(one.file, one.tensor) for one in actual} == {
        (TWO_FILES[0], None),
        *((file, name) for name, file in hit.items()),
    }


def test_a_header_that_contradicts_the_manifest_is_detected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, step=3)
    path = tmp_path / "step-3" / TWO_FILES[0]
    content = path.read_bytes()
    for other in (
        content.replace(b'"F32"', b'"I32"', 1),
        content.replace(b"model.odd", b"model.add", 1),
        content + b"\0",
        # Values that are equal in Python, and two of a name.
        content.replace(b"[0,", b"[0.0,", 1).replace(b"  ", b"", 1),
        content.replace(b'"dtype"', b'"dtype":"I32","dtype"', 1).replace(b" " * 14, b"", 1),
    ):
        path.write_bytes(other)
        (actual,) = verify(open_storage(str(tmp_path)), "step-3")
        assert (actual.file, actual.tensor) == (TWO_FILES[0], None)


def test_files_below_the_name_of_their_attempt(mesh: Mesh) -> None:
    """The file names of an object store."""
    root = f"memory://{secrets.token_hex(8)}"
    tensors = write_checkpoint(root, step=3)
    storage = open_storage(root)
    snapshot = StoredSnapshot(storage, "step-3")
    below = snapshot.manifest.data
    assert below is not None and same(_loaded(root, tensors, mesh), tensors)
    assert verify(storage, "step-3") == []
    assert isinstance(storage, ObjectStore)
    storage._remove(f"step-3/{below}/{TWO_FILES[1]}")
    with pytest.raises(DamagedCheckpoint, match=f"step-3/{below}/{TWO_FILES[1]} is missing"):
        _loaded(root, tensors, mesh)
    assert {one.file for one in verify(storage, "step-3")} == {TWO_FILES[1]}
    with pytest.raises(DamagedCheckpoint, match=f"step-3/{below}/{TWO_FILES[1]} cannot be read"):
        snapshot.part("model.weight", TWO_FILES[1])


@pytest.mark.parametrize("name", [*TWO_FILES, "manifest.json"])
@pytest.mark.parametrize("is_fifo", [False, True])
def test_a_link_out_of_the_step_is_refused(
    tmp_path: Path, mesh: Mesh, name: str, is_fifo: bool
) -> None:
    tensors = write_checkpoint(tmp_path, step=3)
    path, elsewhere = tmp_path / "step-3" / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    if is_fifo:
        # Opening it would block.
        elsewhere.unlink()
        os.mkfifo(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpoint, match=f"{name} is a symbolic link out of the folder"):
        _loaded(tmp_path, tensors, mesh)
    (actual,) = verify(open_storage(str(tmp_path)), "step-3")
    assert (actual.file, actual.tensor) == (name, None)
    assert "symbolic link" in actual.problem


def test_folders_may_be_links(tmp_path: Path, mesh: Mesh) -> None:
    """A dump folder, a step's folder, and a link inside of it."""
    tensors = write_checkpoint(tmp_path / "archive", step=3)
    inner = tmp_path / "archive" / "step-3" / TWO_FILES[0]
    inner.rename(inner.with_suffix(".moved"))
    inner.symlink_to(inner.with_suffix(".moved").name)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-3").symlink_to(tmp_path / "archive" / "step-3")
    (tmp_path / "link").symlink_to("run")
    for root in ("archive", "run", "link"):
        assert same(_loaded(tmp_path / root, tensors, mesh), tensors)
        assert verify(open_storage(str(tmp_path / root)), "step-3") == []
