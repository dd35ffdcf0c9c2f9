"""Which step is stored, which layout is a partition, and which bytes are a fused parameter."""

from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.checkpoint.background.flush import _Flush
from torchtitan_lite.checkpoint.background.save import RankSave
from torchtitan_lite.checkpoint.convert.hugging_face.shared_export import assign_files
from torchtitan_lite.checkpoint.convert.hugging_face.snapshot import _source
from torchtitan_lite.checkpoint.manifest import _is_partition
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout
from torchtitan_lite.nn.spec import HuggingFaceForm


def test_the_newest_stored_step_is_not_later_than_what_the_rank_holds() -> None:
    save: Any = SimpleNamespace(
        complete_slots=lambda: {3: 0, 5: 1}, storage=SimpleNamespace(steps=lambda: [2, 4, 6])
    )
    assert RankSave.newest_stored(save) == 4


def test_of_several_stored_steps_the_newest_counts() -> None:
    storage = SimpleNamespace(steps=lambda: [2, 4, 6])
    flush: Any = SimpleNamespace(_ranks=SimpleNamespace(own=SimpleNamespace(storage=storage)))
    left = {(2, "a"), (4, "b"), (5, "c")}
    assert _Flush._stored_of(flush, left) == 4
    assert _Flush._stored_of(flush, {(5, "c")}) is None


def test_a_partition_splits_every_axis() -> None:
    mesh = HolderMesh.ranks(2, 2)
    assert _is_partition(Layout(mesh, [Shard(0), Shard(1)]))
    assert not _is_partition(Layout(mesh, [Shard(0), Replicate()]))
    assert _is_partition(Layout(HolderMesh.ranks(2, 1), [Shard(0), Replicate()]))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_fused_parameter_is_some_rows_of_each_matrix(part: int) -> None:
    # Four matrices of 6 x 5 float32 numbers, from byte 1000 of a file.
    row_bytes, matrix_bytes = 5 * 4, 6 * 5 * 4
    tensor = SimpleNamespace(
        first=1000, end=1000 + 4 * matrix_bytes, shape=(4, 6, 5), dtype=torch.float32
    )
    folder: Any = SimpleNamespace(tensors={"w": SimpleNamespace(tensor=tensor, file="f")})
    found = _source(folder, HuggingFaceForm(key="w", part=(part, 3)), ["w"], (4, 2, 5))
    rows = [astuple(one)[-2:] for one in found.pieces]
    starts = [1000 + matrix * matrix_bytes + 2 * part * row_bytes for matrix in range(4)]
    assert rows == [(start, start + 2 * row_bytes) for start in starts]


def test_the_largest_files_are_spread_over_the_ranks() -> None:
    files: Any = [SimpleNamespace(num_bytes=size) for size in (5, 9, 4, 1)]
    shares = assign_files(files, [2, 0])
    assert {rank: [one.num_bytes for one in own] for rank, own in shares.items()} == {
        2: [9, 1],
        0: [5, 4],
    }
