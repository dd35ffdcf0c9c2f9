"""Gradient buckets: all are reduced, in one order, and as early as they are complete."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchtitan_lite.fault_tolerance.replica.gradient_reducer import GradientReducer


class _Twice:
    """Stands for a group of two replicas with equal gradients; records what is sent, and when."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.most_bytes = 0
        """The largest memory of a bucket."""
        self.are_done = True

    def all_reduce_sum(self, flat: torch.Tensor) -> "_Reduction":
        self.sent.append(flat.numel())
        self.most_bytes = max(self.most_bytes, flat.untyped_storage().nbytes())
        return _Reduction(self, flat)


class _Reduction:
    """Has its result, of what was sent, after `wait`."""

    def __init__(self, group: _Twice, flat: torch.Tensor) -> None:
        self._group, self._flat, self._sum = group, flat, 2 * flat

    def is_done(self) -> bool:
        return self._group.are_done

    def wait(self) -> None:
        self._flat.copy_(self._sum)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))


def _backward(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().sum().backward()


def _sums(group: _Twice, per_bucket: int) -> GradientReducer:
    return GradientReducer(group, per_bucket * 16 * 16 * 4)  # pyright: ignore[reportArgumentType]


def _run(group: _Twice, before_last: Callable[[GradientReducer, list[nn.Parameter]], None]):
    model, sums = _model(), _sums(group, per_bucket=2)
    parameters = list(model.parameters())
    counts, early = torch.tensor([3.0], dtype=torch.float64), []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        group.sent.clear()
        _backward(model, torch.ones(4, 16))
        before_last(sums, parameters)
        _backward(model, torch.ones(4, 16))
        early = list(group.sent)
        counts.fill_(3)
        sums.reduce(parameters, counts)
    gradients = torch.stack([one.grad for one in parameters if one.grad is not None])
    return gradients, counts.item(), early, list(group.sent)


def test_reduction_during_backward_equals_reduction_after_it() -> None:
    late = _run(_Twice(), lambda sums, parameters: None)
    early = _run(_Twice(), GradientReducer.reduce_during_backward)
    slow = _Twice()
    slow.are_done = False
    blocked = _run(slow, GradientReducer.reduce_during_backward)
    assert [run[2] for run in (late, early, blocked)] == [[], [512] * 3, [512] * 3]
    assert late[3] == early[3] == [512, 512, 512, 7]
    for run in (early, blocked):
        assert run[1] == late[1] == 6
        assert torch.equal(run[0], late[0])
    single = _model()
    for _ in range(2):
        _backward(single, torch.ones(4, 16))
    for actual, parameter in zip(late[0], single.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(actual, 2 * parameter.grad)


def test_backward_does_not_wait() -> None:
    group = _Twice()
    group.are_done = False
    model, sums = _model(), _sums(group, per_bucket=1)
    parameters = list(model.parameters())
    sums.reduce_during_backward(parameters)
    _backward(model, torch.ones(4, 16))
    assert len(group.sent) == 3
    sums.reduce(parameters, torch.zeros(1, dtype=torch.float64))
    assert len(group.sent) == 7
    assert group.most_bytes == 16 * 16 * 4


def test_a_replica_without_samples_makes_the_same_calls() -> None:
    idle, busy = _Twice(), _Twice()
    model = _model()
    parameters = list(model.parameters())
    _sums(idle, 2).reduce(parameters, torch.zeros(1, dtype=torch.float64))
    assert all(parameter.grad is None for parameter in parameters)
    _run(busy, GradientReducer.reduce_during_backward)
    assert idle.sent == busy.sent


def test_a_bucket_that_is_not_full_sends_only_its_gradients() -> None:
    group, parameters = _Twice(), list(_model().parameters())
    sums = _sums(group, per_bucket=4)
    for _ in range(2):
        sums.reduce(parameters, torch.zeros(1, dtype=torch.float64))
    assert group.sent == [4 * 256, 2 * 256, 7] * 2


def test_only_the_announced_backward_reduces() -> None:
    """Also if it did not take place, because this replica had no samples."""
    group, model = _Twice(), _model()
    sums, parameters = _sums(group, per_bucket=2), list(model.parameters())
    sums.reduce_during_backward(parameters)
    sums.reduce(parameters, torch.zeros(1, dtype=torch.float64))
    group.sent.clear()
    for _ in range(2):
        _backward(model, torch.ones(4, 16))
    assert group.sent == []


@pytest.mark.parametrize("during_backward", [False, True])
def test_gradients_survive_a_failed_sum_and_accumulate(during_backward: bool) -> None:
    model, group = _model(), _Twice()
    sums = _sums(group, per_bucket=2)
    sums.keeps_gradients = True
    parameters = list(model.parameters())
    absent = nn.Parameter(torch.zeros(3))
    all_parameters = [*parameters, absent]
    expected = _model()
    for scale in (1.0, 2.0, 4.0):
        _backward(expected, torch.full((4, 16), scale))
    counts = torch.zeros(1, dtype=torch.float64)
    for number, scale in enumerate((1.0, 2.0)):
        if during_backward:
            sums.reduce_during_backward(all_parameters)
        _backward(model, torch.full((4, 16), scale))
        before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        sums.reduce(all_parameters, counts)
        assert all(
            torch.equal(parameter.grad, 2 * values)
            for parameter, values in zip(parameters, before, strict=True)
            if parameter.grad is not None
        )
        # The reduction has failed: whatever it has left in the gradients does not count.
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.fill_(float("nan"))
        sums.end_step(restores=True)
        assert absent.grad is None and not sums._kept, number
    _backward(model, torch.full((4, 16), 4.0))
    for parameter, other in zip(parameters, expected.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        assert torch.equal(parameter.grad, other.grad)


def test_buffers_of_a_committed_step_are_used_again() -> None:
    model, group = _model(), _Twice()
    sums = _sums(group, per_bucket=2)
    sums.keeps_gradients = True
    parameters, counts = list(model.parameters()), torch.zeros(1, dtype=torch.float64)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = None
        _backward(model, torch.ones(4, 16))
        sums.reduce(parameters, counts)
        sums.end_step(restores=False)
    assert sum(map(len, sums._free.values())) == 3
    assert sums.num_bytes == 6 * 16 * 16 * 4
