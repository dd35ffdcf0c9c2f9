"""Holders that are not ranks: a plan to files and back is executed on real files, by a plan
executor without processes."""

from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard

from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, plan
from torchtitan_lite.distributed.redistribute.execution.program import rectangles, slices
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.plan import Plan

SHAPE = (13, 6)


def test_state_is_written_to_files_and_read_on_other_ranks(tmp_path: Path) -> None:
    full = np.arange(78, dtype=np.int32).reshape(SHAPE)
    saving = Layout(HolderMesh.ranks(2, 2), [Replicate(), Shard(0)])
    files = Layout(HolderMesh((3,), ("a.bin", "b.bin", "c.bin"), ("file",)), [Shard(0)])
    loading = Layout(HolderMesh.ranks(5), [Shard(1)])

    live = _parts(saving, full)
    stored: dict[Holder, np.ndarray] = {
        name: np.memmap(tmp_path / str(name), np.int32, "w+", shape=_local_shape(files, name))
        for name in files.mesh.holders
    }
    to_files = plan(saving, files, SHAPE, torch.int32)
    written = _execute(to_files, live, stored)
    for memory in stored.values():
        assert isinstance(memory, np.memmap)
        memory.flush()
    assert written == full.nbytes == to_files.moved_bytes

    actual: dict[Holder, np.ndarray] = {
        name: np.memmap(tmp_path / str(name), np.int32, "r", shape=_local_shape(files, name))
        for name in files.mesh.holders
    }
    restored: dict[Holder, np.ndarray] = {
        rank: np.empty(_local_shape(loading, rank), np.int32) for rank in range(5)
    }
    from_files = plan(files, loading, SHAPE, torch.int32)
    read = _execute(from_files, actual, restored)
    assert read == full.nbytes
    for rank, part in _parts(loading, full).items():
        assert np.array_equal(restored[rank], part)


def test_replicas_divide_the_writing() -> None:
    saving = Layout(HolderMesh.ranks(2, 2), [Replicate(), Shard(0)])
    file = Layout(HolderMesh((1,), ("all.bin",)), [Replicate()])
    to_file = plan(saving, file, (4096, 8), torch.float32)
    sent = [sum(p.stop - p.start for p in to_file.transfers(rank)[0].sends) for rank in range(4)]
    assert sent == [4096 * 8 // 4] * 4


def _parts(layout: Layout, whole: np.ndarray) -> dict[Holder, np.ndarray]:
    result = {}
    for holder in layout.mesh.holders:
        boxes = layout.boxes(whole.shape, holder)
        empty = np.empty(layout.local_shape(whole.shape, holder), whole.dtype)
        result[holder] = whole[boxes[0].slices].copy() if boxes else empty
    return result


def _local_shape(layout: Layout, holder: Holder) -> tuple[int, ...]:
    return layout.local_shape(SHAPE, holder)


def _execute(
    found: Plan, sources: dict[Holder, np.ndarray], results: dict[Holder, np.ndarray]
) -> int:
    """Copy every piece from its sender, and return the number of copied bytes."""
    copied = 0
    for holder, result in results.items():
        (part,) = found.transfers(holder)
        for piece in (*part.receives, *part.copies):
            for block in rectangles(piece.ranges, piece.start, piece.stop):
                part = sources[piece.peer][slices(block.src, block.shape)]
                result[slices(block.dst, block.shape)] = part
                copied += part.nbytes
    return copied
