"""The rows of a sharded vocabulary, and what the ranks of a shard agree on."""

import torch

from tests.harness.threads import run_on_threads
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.parallel.tensor import _RowsOfRank


def test_maxima_and_sums_are_over_the_ranks_that_share_a_vocabulary() -> None:
    def reduce() -> tuple[int, float, float]:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=2, tp=2))
        rows = _RowsOfRank(mesh.device_mesh["tp"], 7)
        value = mesh.rank + 1.0
        greatest, total = (reduce(torch.tensor([value])) for reduce in (rows.max_, rows.sum_))
        return rows.first, greatest.item(), total.item()

    assert run_on_threads(4, reduce) == [(0, 2, 3), (4, 2, 3), (0, 4, 7), (4, 4, 7)]


def test_ranks_behind_the_last_row_begin_there() -> None:
    def first() -> int:
        mesh = Mesh(detect_device("cpu"), ParallelDims(tp=4))
        return _RowsOfRank(mesh.device_mesh["tp"], 5).first

    # Two rows per rank.
    assert run_on_threads(4, first) == [0, 2, 4, 5]
