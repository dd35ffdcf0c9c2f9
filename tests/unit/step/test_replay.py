"""A recomputation with other gradients than the first differs, and raises nothing."""

from typing import Any

import torch

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
