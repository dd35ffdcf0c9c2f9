"""The mean loss over the held-out targets of all ranks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness.threads import run_on_threads
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.nn.spec import IGNORE_INDEX, Microbatch
from torchtitan_lite.training.validation import HeldOutLoss, validate

_LOSS_OF_ROUND = 2**25 + 1
"""Float32 has no odd integers of this size."""


def _microbatch(num_targets: int) -> Microbatch:
    targets_BS = torch.full((1, 8), IGNORE_INDEX)
    targets_BS[:, :num_targets] = 1
    return Microbatch(
        tokens_BS=targets_BS,
        targets_BS=targets_BS,
        positions_BS=targets_BS,
        documents_BS=None,
        rng_keys_B=torch.zeros(1),
        samples=(0,),
    )


class _Schedule:
    """Each target has the same loss, and the ranks with the same tokens share it."""

    min_microbatches = 2

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def run(self, microbatches: Sequence[Microbatch], *, backward: bool) -> torch.Tensor:
        assert len(microbatches) == self.min_microbatches and not backward
        total = torch.tensor(_LOSS_OF_ROUND, dtype=torch.float64)
        return total / self._mesh.degrees.token_copies


@pytest.mark.parametrize("degrees", [ParallelDims(dp_shard=2), ParallelDims(tp=2)], ids=str)
def test_the_loss_is_per_target_of_all_ranks(degrees: ParallelDims) -> None:
    def held_out() -> HeldOutLoss:
        mesh = Mesh(detect_device("cpu"), degrees)

        def microbatches(batch_rank: int, num_batch_ranks: int) -> list[list[Microbatch]]:
            assert num_batch_ranks == degrees.batch
            return [[_microbatch(num)] for num in (3, 2, 1 + batch_rank)]

        data: Any = SimpleNamespace(microbatches=microbatches)
        schedule: Any = _Schedule(mesh)
        model = torch.nn.Linear(2, 2)
        result = validate(model, schedule, data, mesh)
        assert model.training
        return result

    # Three microbatches are two rounds of two.
    num_targets = 6 if degrees.batch == 1 else 6 + 7
    mean = degrees.batch * 2 * _LOSS_OF_ROUND / num_targets
    assert run_on_threads(2, held_out) == [HeldOutLoss(mean=mean, num_targets=num_targets)] * 2
