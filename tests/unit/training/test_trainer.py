"""The loss of a step, and the factor of its gradients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.training.step.totals import StepTotals
from torchtitan_lite.training.trainer import _forward_backward, _update

_MAX_NORM = 0.5


@pytest.mark.parametrize(
    ("mean_norm", "factor"),
    [(0.25, 1 / 8), (2.0, 0.25 / 8)],
    ids=["below the limit", "above the limit"],
)
def test_gradients_are_those_of_the_mean_loss_and_clipped(mean_norm: float, factor: float) -> None:
    num_targets = 8.0
    none = torch.zeros(0)
    totals = StepTotals(
        squared_norm=(mean_norm * num_targets) ** 2,
        num_stop_requests=0,
        num_signaled=0,
        loss=3.0,
        num_targets=num_targets,
        num_ranks=1,
        cursor_sum=0,
        step_sum=0,
        save_signals=none,
        work_times=none,
        rank_flags=none,
        router_counts=none,
    )
    calls: list[tuple[float, float]] = []
    state = SimpleNamespace(
        step=4,
        lr_scheduler=SimpleNamespace(lr=lambda step: step * 0.1),
        optimizer=SimpleNamespace(step=lambda lr, factor: calls.append((lr, factor))),
    )
    job: Any = SimpleNamespace(state=state, max_norm=_MAX_NORM)
    _update(job, totals)
    assert calls == [(0.4, pytest.approx(factor, rel=1e-5))]


def test_a_large_loss_keeps_its_digits() -> None:
    """Float32 has no odd integers of this size."""
    loss = 2**25 + 1
    job: Any = SimpleNamespace(
        mesh=SimpleNamespace(device=detect_device("cpu")),
        monitor=SimpleNamespace(begin_forward=lambda: None),
        replicas=SimpleNamespace(reduce_during_backward=lambda parameters: None),
        pipeline_schedule=SimpleNamespace(
            run=lambda *args, **options: torch.tensor(loss, dtype=torch.float64)
        ),
    )
    microbatches: Any = ["one"]
    assert _forward_backward(job, microbatches, []).item() == loss
    assert _forward_backward(job, [], []).item() == 0
