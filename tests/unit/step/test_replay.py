"""A recomputation with other gradients than the first differs, and raises nothing."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.harness.threads import run_on_threads
from torchtitan_lite.device import detect_device
from torchtitan_lite.mesh import Mesh, ParallelDims
from torchtitan_lite.replica import Share, SingleReplica
from torchtitan_lite.step.replay import Replay


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
