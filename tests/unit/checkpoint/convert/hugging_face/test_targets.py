"""An export does not touch a folder that exists or that another process completes; what it checks
before it writes."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed.tensor import Replicate

from torchtitan_lite.checkpoint.convert.hugging_face import shared_export, to_hf, to_peft
from torchtitan_lite.checkpoint.convert.hugging_face.export import check_target
from torchtitan_lite.checkpoint.convert.hugging_face.partial_folder import (
    PartialFolder,
    TargetExists,
)
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import _ZEROS, HuggingFaceSnapshot
from torchtitan_lite.checkpoint.convert.hugging_face.to_hf import HuggingFaceExport
from torchtitan_lite.checkpoint.convert.hugging_face.to_peft import AdapterExport
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.cli import convert as command
from torchtitan_lite.cli import main
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, TensorSpec


@pytest.fixture
def folder(tmp_path: Path) -> PartialFolder:
    return PartialFolder(tmp_path / "out", "ab12", Files())


def test_a_target_that_exists_is_refused(
    folder: PartialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = folder.target
    check_target(target, None)
    target.mkdir()
    spec: Any = SimpleNamespace(name="a", flavor="b", hugging_face=None)
    source: Any = SimpleNamespace(where="a checkpoint", tensors={})
    unused: Any = None
    monkeypatch.setattr(to_peft, "recorded_base", lambda source: "a base")
    for refuses in (
        lambda: check_target(target, None),
        lambda: HuggingFaceExport(source, target, spec),
        lambda: AdapterExport(source, target, spec, unused),
        lambda: folder.open().__enter__(),
    ):
        with pytest.raises(TargetExists, match="already exists"):
            refuses()


def test_a_target_that_another_process_completes_explains_the_failure(
    folder: PartialFolder,
) -> None:
    with pytest.raises(TargetExists), folder.open():
        folder.target.mkdir()
        raise OSError("a file has gone")


def test_an_attempt_that_is_not_there_is_not_joined(folder: PartialFolder) -> None:
    with folder.open():
        other = PartialFolder(folder.target, "ab12", Files())
        other.join(folder.attempt)
        with pytest.raises(CheckpointError, match="is not the folder that rank 0 writes to"):
            other.join("another")


def test_the_space_on_the_disk_is_checked_before_the_folder_is_made(
    folder: PartialFolder, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(path: Path, num_bytes: int) -> NoReturn:
        raise CheckpointError(f"{path} has no space for {num_bytes} bytes")

    monkeypatch.setattr(shared_export, "check_disk_space", is_full)
    export: Any = SimpleNamespace(folder=folder, num_bytes_left=9, shards_left=[])
    with ExitStack() as stack, pytest.raises(CheckpointError, match="no space for 9 bytes"):
        shared_export._open(lambda: export, stack)
    assert not folder.path.exists()


def test_trained_expert_biases_are_not_dropped_in_silence(
    folder: PartialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = SimpleNamespace(name="layers.*.router.bias", forms=())
    spec: Any = SimpleNamespace(hugging_face=SimpleNamespace(keys=[rule]))
    name = "layers.0.router.bias"
    source: Any = SimpleNamespace(where="a checkpoint", tensors={f"model.{name}": None})
    monkeypatch.setattr(to_hf, "_weights", lambda source, spec: [name])
    monkeypatch.setattr(to_hf, "read_tensor", lambda source, name: torch.tensor([0.0, 0.5]))
    with pytest.raises(CheckpointError, match="has trained expert biases"):
        HuggingFaceExport(source, folder.target, spec)


@pytest.mark.parametrize(("holder", "shape"), [(_ZEROS, (3, 2)), ("a file", (0, 2))])
def test_a_part_that_no_file_has_is_zeros(holder: str, shape: tuple[int, ...]) -> None:
    layout = Layout(HolderMesh((1,), (holder,), ("dp",)), [Replicate()])
    snapshot: Any = SimpleNamespace(
        tensors={"a": TensorSpec(layout, shape, torch.float32)}, _sources={}
    )
    found = HuggingFaceSnapshot.part(snapshot, "a", holder)
    torch.testing.assert_close(found, torch.zeros(shape))


def test_the_space_of_a_converted_folder_is_checked_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []

    def is_full(path: Path, num_bytes: int) -> NoReturn:
        checked.append(path)
        raise CheckpointError("it is full")

    def convert(**unused: Any) -> NoReturn:
        pytest.fail("it converts")

    work = SimpleNamespace(assets=tmp_path / "assets", num_bytes_left=9, num_bytes=9, run=convert)
    monkeypatch.setattr(command, "check_disk_space", is_full)
    monkeypatch.setattr(command, "_open_step", lambda *_, **__: (None, None))
    monkeypatch.setattr(command, "_export", lambda *_: work)
    monkeypatch.setattr(command, "_prepare", lambda *_: work)
    assert main(["convert", "to-hf", "step-1", str(tmp_path / "out")]) == 1
    assert main(["convert", "from-hf", "folder", str(tmp_path / "in")]) == 1
    assert checked == [tmp_path / "out", tmp_path / "assets"]
