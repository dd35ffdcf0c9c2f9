"""A recomputation with other gradients than the first differs, and raises nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness.threads import run_on_threads
from torchtitan_lite.core import rng
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.fault_tolerance.replica import Share, SingleReplica
from torchtitan_lite.training.step.replay import _COMPUTED, Replay


def test_other_numbers_of_gradients_differ() -> None:
    unused: Any = None
    replay = Replay(torch.nn.Linear(2, 2), unused, unused, unused, tolerance=0.01)
    assert replay._equal([torch.ones(2)], [torch.ones(2)])
    assert not replay._equal([torch.ones(2)], [torch.ones(3)])
    assert not replay._equal([torch.ones(2)], [])


def test_a_new_step_forgets_the_gradients_of_the_last() -> None:
    unused: Any = None
    model = torch.nn.Linear(2, 2)
    replay = Replay(model, unused, unused, unused, tolerance=0.01)
    model(torch.ones(1, 2)).sum().backward()
    replay.record_local_gradients(list(model.parameters()))
    assert replay._shards is not None and replay._parameters
    replay.begin()
    assert replay._shards is None and not replay._parameters


def test_a_change_in_the_last_bit_of_one_gradient_is_seen() -> None:
    unused: Any = None
    model = torch.nn.Linear(100, 100)
    replay = Replay(model, unused, unused, unused, tolerance=0)
    parameters = list(model.parameters())

    def norm_of_shards() -> torch.Tensor:
        replay.record_local_gradients(parameters)
        assert replay._shards is not None
        return replay._shards

    model.weight.grad = torch.ones(100, 100)
    before = norm_of_shards()
    assert replay._equal([before], [norm_of_shards()])
    model.weight.grad[5, 7] = 1 + torch.finfo(torch.float32).eps
    assert not replay._equal([before], [norm_of_shards()])


def test_all_ranks_name_the_one_that_computes_otherwise() -> None:
    def find() -> list[int] | None:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=3))
        loss = torch.tensor(2.0, dtype=torch.float64)
        again: Any = SimpleNamespace(run=lambda *args, **options: loss + (mesh.rank == 1))
        optimizer: Any = SimpleNamespace(zero_grad=lambda: None)
        replay = Replay(torch.nn.Linear(2, 2), again, optimizer, mesh, tolerance=0.01)
        replay.begin()
        microbatches: Any = ["one"]
        share = Share(index=0, count=1)
        return replay.find_mismatching_ranks(loss, microbatches, share, SingleReplica())

    assert run_on_threads(3, find) == [[1]] * 3


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_recomputation_has_the_random_numbers_of_the_step(scale: float) -> None:
    """With other gradients for the same loss, the rank has computed differently. None are left."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    factors = [1.0, scale]

    def run(microbatches: object, *, backward: bool) -> torch.Tensor:
        loss = model(torch.ones(4, 8)).sum()
        (factors.pop(0) * loss).backward()
        return loss.detach()

    flags: list[torch.Tensor] = []
    schedule: Any = SimpleNamespace(run=run)
    optimizer: Any = SimpleNamespace(zero_grad=model.zero_grad)
    mesh: Any = SimpleNamespace(world_size=1, rank=0, all_reduce_=lambda given: given)
    replicas: Any = SimpleNamespace(all_reduce=lambda given: flags.append(given) or True)
    replay = Replay(model, schedule, optimizer, mesh, tolerance=1e-6)
    before = rng.capture()
    replay.begin()
    loss, microbatch = schedule.run([], backward=True), object()
    replay.record_local_gradients(list(model.parameters()))
    # What follows the step, such as a validation.
    torch.rand(5)
    found = replay.find_mismatching_ranks(loss, [microbatch], Share(index=0, count=1), replicas)  # pyright: ignore
    rng.restore(before)
    assert found == ([] if scale == 1.0 else [0])
    assert [one.tolist() for one in flags] == [[0.0 if scale == 1.0 else _COMPUTED]]
    assert all(parameter.grad is None for parameter in model.parameters())
