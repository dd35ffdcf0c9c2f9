"""Ranks that share a GPU are named on all ranks. The GPUs' identities are given; the ranks and
their communication are real."""

from collections.abc import Callable

import torch.distributed as dist

from tests.harness.ranks import WorkerPool
from torchtitan_lite.core.errors import MeshError
from torchtitan_lite.distributed.mesh import check_own_gpus


def test_ranks_with_the_same_gpu_are_named(pools: Callable[[int], WorkerPool]) -> None:
    shared = pools(2).run(_problem, ["GPU-a", "GPU-a"])
    assert [text.partition(" have")[0] for text in shared] == ["Ranks 0, 1"] * 2
    assert pools(2).run(_problem, ["GPU-a", "GPU-b"]) == ["", ""]
    assert pools(2).run(_problem, ["", ""]) == ["", ""]


def _problem(uuids: list[str]) -> str:
    try:
        check_own_gpus(uuids[dist.get_rank()])
    except MeshError as error:
        return str(error)
    return ""
