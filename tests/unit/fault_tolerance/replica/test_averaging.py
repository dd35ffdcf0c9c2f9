"""torchft's averaging algorithms follow their papers; alone, and with another replica whose weights
are known."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from torchtitan_lite.config.tables.fault_tolerance import FaultToleranceConfig
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.fault_tolerance.replica.semi_synchronous import Averaging, fragments_of


class _Done:
    def wait(self) -> bool:
        return True


class _Quorum:
    """A quorum of this replica and another one, which has changed every weight by `other`; commits
    follow `commits`."""

    def __init__(self, other: float, commits: Sequence[bool]) -> None:
        self._other, self._commits = other, list(commits)

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> _Done:
        tensor.add_(self._other).div_(2)
        return _Done()

    def should_commit(self) -> bool:
        return self._commits.pop(0)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def _averaging(model: nn.Module, other: float, commits: Sequence[bool], **changes) -> Averaging:
    averaging = Averaging(FaultToleranceConfig(**changes), model)
    averaging.connect(_Quorum(other, commits))  # pyright: ignore[reportArgumentType]
    return averaging


def _move(model: nn.Module, by: float) -> None:
    """Change the weights as inner steps do."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_local_sgd_averages() -> None:
    model = _model()
    averaging = _averaging(model, 3.0, [False, True], semi_sync_method="local_sgd", sync_steps=4)
    assert [step for step in range(9) if averaging.is_due(step)] == [4, 8]
    before = _flat(model)
    assert averaging.start(4, 1.0) is False
    # The average failed, and everything is as before: it is due again.
    assert torch.equal(_flat(model), before)
    assert averaging.is_due(4)
    assert averaging.start(4, 1.0) is True
    assert not averaging.is_due(4)
    torch.testing.assert_close(_flat(model), (before + 3.0) / 2)
    assert averaging.tensors() == {}


def test_diloco_follows_its_paper() -> None:
    model = _model()
    commits = [True, True, False, True]
    averaging = _averaging(model, 0.5, commits, semi_sync_method="diloco", sync_steps=2)
    weights, momentum = _flat(model), torch.zeros(())
    for step, by, committed in zip((2, 4, 6, 8), (0.1, -0.2, 7.0, 0.3), commits[:], strict=True):
        _move(model, by)
        assert averaging.is_due(step)
        assert averaging.start(step, 1.0) is committed
        if committed:
            gradient = (-by + 0.5) / 2
            momentum = 0.9 * momentum + gradient
            weights = weights - 0.7 * (gradient + 0.9 * momentum)
        torch.testing.assert_close(_flat(model), weights)
    assert averaging.values() == {"averages": 3, "tried_at": 8}
    saved = averaging.tensors()
    assert set(saved) == {
        f"{name}.{slot}"
        for name, _ in model.named_parameters()
        for slot in ("outer_parameter", "outer_momentum")
    }
    assert torch.equal(saved["0.weight.outer_parameter"], next(model.parameters()))
    torch.testing.assert_close(saved["1.bias.outer_momentum"], momentum.expand(2).to(torch.float64))


def test_state_can_be_loaded_into_another_instance() -> None:
    models = [_model(), _model()]
    both = [
        _averaging(model, 0.5, [True] * 3, semi_sync_method="diloco", sync_steps=1)
        for model in models
    ]
    first, second = both
    for step in (1, 2):
        _move(models[0], 0.1 * step)
        first.start(step, 1.0)
    # As healing and checkpoints do: into the live tensors.
    with torch.no_grad():
        for source, target in zip(models[0].parameters(), models[1].parameters(), strict=True):
            target.copy_(source)
    for name, tensor in second.tensors().items():
        tensor.copy_(first.tensors()[name])
    second.load_values(first.values())
    assert first.progress(2) == second.progress(2) == 2 * 10**9 + 2
    for model, averaging in zip(models, both, strict=True):
        _move(model, -0.4)
        averaging.start(3, 1.0)
    assert torch.equal(_flat(models[0]), _flat(models[1]))


def test_streaming_diloco_averages_one_fragment_after_the_other() -> None:
    model = _model()
    averaging = _averaging(
        model,
        0.5,
        [True] * 2,
        semi_sync_method="streaming_diloco",
        sync_steps=6,
        num_fragments=2,
        fragment_sync_delay=1,
        fragment_update_alpha=0.25,
    )
    fragments = [list(one.parameters.values()) for one in fragments_of(model, 2)]
    assert [step for step in range(13) if averaging.is_due(step)] == [2, 5, 8, 11]
    for fragment, step in zip(fragments, (2, 5), strict=True):
        others = [p for p in model.parameters() if all(p is not one for one in fragment)]
        start = {p: averaging.tensors()[f"{n}.outer_parameter"].clone() for n, p in
                 model.named_parameters()}  # fmt: skip
        _move(model, 0.1)
        sent = {p: start[p] - p.detach() for p in fragment}
        assert averaging.start(step, 1.0) is None
        assert averaging.in_progress and not averaging.is_due(step)
        _move(model, 0.2)
        local = {p: p.detach().clone() for p in model.parameters()}
        assert averaging.advance() is True
        for p in fragment:
            gradient = (sent[p] + 0.5) / 2
            outer = start[p] - 0.7 * 1.9 * gradient
            torch.testing.assert_close(p.detach(), outer.lerp(local[p], 0.25))
        assert all(torch.equal(p.detach(), local[p]) for p in others)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_fragments_hold_every_parameter_once(count: int) -> None:
    model = _model()
    fragments = fragments_of(model, count)
    names = [name for fragment in fragments for name in fragment.parameters]
    assert names == [name for name, _ in model.named_parameters()]
    assert len(fragments) == count and all(fragment.parameters for fragment in fragments)


def test_more_fragments_than_parameters_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"num_fragments \(5\) is above the 4 parameters"):
        fragments_of(_model(), 5)
