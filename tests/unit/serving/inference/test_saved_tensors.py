"""Tensors of saved states: whole, in part, and as DTensors on meshes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.harness.hugging_face import make_folder, tensors_of
from tests.harness.ranks import WorkerPool
from tests.unit.checkpoint.small_checkpoint import write_checkpoint
from torchtitan_lite.api import saved_tensors
from torchtitan_lite.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    LayoutError,
    MeshError,
    UserError,
)
from torchtitan_lite.serving.inference.saved_tensors import _contiguous

Pools = Callable[[int], WorkerPool]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a checkpoint with step 3, written by two ranks, and its tensors."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    write_checkpoint(folder, 2)
    return folder, write_checkpoint(folder, 3)


def test_all_tensors_of_a_step_are_listed_and_read(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, expected = saved
    for path in (folder, folder.parent, str(folder / "step-3")):
        found = saved_tensors(path)
        assert list(found) == sorted(expected)
        for name, tensor in found.items():
            assert tensor.where == str(folder / "step-3")
            assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)
            assert torch.equal(tensor.read(), expected[name]), name


@pytest.mark.parametrize(
    "index",
    [
        5, -1, -300, slice(3), slice(140, 160), slice(-2, None), slice(9, 4), slice(1000),
        (7, 2), (slice(149, 151), slice(1, 3)), (slice(None), -1), (),
    ],
)  # fmt: skip
def test_a_part_equals_that_of_the_tensor(
    index: Any, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    folder, expected = saved
    name = "model.weight"
    part = saved_tensors(folder)[name][index]
    assert torch.equal(part, expected[name][index]) and part.shape == expected[name][index].shape


def test_a_part_needs_only_the_files_that_hold_it(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, expected = saved
    shutil.copytree(folder / "step-3", tmp_path / "step-3")
    tensor = saved_tensors(tmp_path)["model.weight"]
    # The second rank's file, which has the rows from 150.
    (path,) = (p for p in (tmp_path / "step-3").glob("*.safetensors") if "1" in p.stem)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)
    assert torch.equal(tensor[:150], expected["model.weight"][:150])
    with pytest.raises(DamagedCheckpoint, match="model.weight"):
        tensor[:151]


def test_a_hugging_face_folder_has_the_names_of_this_package(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "llama")
    theirs, ours = tensors_of(folder), saved_tensors(folder)
    assert len(ours) == len(theirs)
    embeddings = theirs["model.embed_tokens.weight"]
    assert torch.equal(ours["model.tok_embeddings.weight"].read(), embeddings)
    assert torch.equal(ours["model.tok_embeddings.weight"][100:103, 5], embeddings[100:103, 5])
    with pytest.raises(CheckpointError, match="no moving average"):
        saved_tensors(folder, ema=True)


def test_errors(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none contains no checkpoint. Give the folder"):
        saved_tensors(tmp_path / "none")
    tensor = saved_tensors(saved[0])["model.weight"]
    with pytest.raises(IndexError, match=r"\(300, 7\): 3 indices"):
        tensor[0, 0, 0]
    for index in (300, -301):
        with pytest.raises(IndexError, match="300 elements"):
            tensor[index]
    for index in (slice(0, 9, 2), None, [1, 2], True):
        with pytest.raises(UserError, match="slices of step 1"):
            tensor[index]  # pyright: ignore[reportArgumentType]


def distributed(folder: Path) -> list[tuple[str, bool]]:
    """Return on one rank, for layouts on several meshes, whether the shards of a tensor and the
    whole are right."""
    (expected,) = [t.read() for n, t in saved_tensors(folder).items() if n == "model.weight"]
    results = []
    for shape in ((2,), (2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape)
        for placement in (Shard(0), Shard(1), Shard(-1), Replicate()):
            placements = [placement if size > 1 else Replicate() for size in shape]
            tensor = saved_tensors(folder)["model.weight"].distribute(mesh, placements)
            is_right = torch.equal(tensor.full_tensor(), expected)
            if isinstance(placement, Shard):
                own = expected.chunk(2, placement.dim)[torch.distributed.get_rank()]
                is_right &= torch.equal(tensor.to_local(), own)
            results.append((str((shape, placements)), is_right))
    return results


def errors_of_distribute(folder: Path) -> list[str]:
    """Return the errors on one rank."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    tensor = saved_tensors(folder)["model.weight"]
    other = saved_tensors(folder / f"step-{2 + rank}")["model.weight"]
    errors = []
    for action, kind in (
        (lambda: tensor.distribute(mesh["tp"], [Shard(0)]), MeshError),
        (lambda: tensor.distribute(mesh, [Partial(), Replicate()]), LayoutError),
        (lambda: tensor.distribute(mesh, [Shard(2), Replicate()]), LayoutError),
        (lambda: tensor.distribute(mesh, [Shard(0)]), LayoutError),
        (lambda: other.distribute(mesh, [Shard(0), Replicate()]), CheckpointError),
    ):
        with pytest.raises(kind) as raised:
            action()
        errors.append(str(raised.value))
    return errors


def test_a_tensor_is_read_onto_any_mesh_of_all_ranks(
    saved: tuple[Path, dict[str, torch.Tensor]], pools: Pools
) -> None:
    for results in pools(2).run(distributed, saved[0]):
        assert len(results) == 12 and [case for case, is_right in results if not is_right] == []
    for mesh, partial, dim, count, steps in pools(2).run(errors_of_distribute, saved[0]):
        assert "the mesh has 1 ranks, but there are 2" in mesh
        assert "Contributions" in partial and "2" in dim and count
        assert "step-2 and " in steps and "step-3. Name the folder of a step" in steps


@pytest.mark.parametrize(
    "index", [-3, -1, 0, 2, slice(None), slice(1, 3, 1), slice(-2, None), slice(2, 1), slice(9, 12)]
)
def test_ranges_are_those_of_an_index(index: int | slice) -> None:
    values = torch.arange(3)
    expected = values[index] if isinstance(index, slice) else values[index][None]
    assert torch.equal(values[_contiguous("weight", index, 3)], expected)
