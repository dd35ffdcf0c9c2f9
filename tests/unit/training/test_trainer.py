"""The loss of a step, and the factor of its gradients."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_lite.core.errors import DamagedState, MachineFault, TrainingDiverged
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.training.step.kept_work import KeptWork
from torchtitan_lite.training.step.totals import StepTotals
from torchtitan_lite.training.trainer import _end, _forward_backward, _update, _update_on_device

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
        kept_work=KeptWork(),
    )
    microbatches: Any = ["one"]
    assert _forward_backward(job, microbatches, []).item() == loss
    assert _forward_backward(job, [], []).item() == 0
    job.kept_work.loss = torch.tensor(2.0, dtype=torch.float64)
    assert _forward_backward(job, microbatches, []).item() == loss + 2
    assert _forward_backward(job, [], []).item() == 2


@pytest.mark.parametrize("conditions", [*itertools.product([True, False], repeat=3)])
def test_weights_are_updated_before_the_decision_only_if_it_depends_on_the_step_alone(
    conditions: tuple[bool, bool, bool],
) -> None:
    """Replicas vote, spikes depend on earlier steps, and not every optimizer can skip."""
    steps: list[tuple[Any, ...]] = []
    optimizer = SimpleNamespace(
        can_step_unless=lambda device: conditions[2], step_unless=lambda *given: steps.append(given)
    )
    job: Any = SimpleNamespace(
        replicas=SimpleNamespace(always_commits=conditions[0]),
        monitor=SimpleNamespace(detector=SimpleNamespace(ignores_history=conditions[1])),
        mesh=SimpleNamespace(device=detect_device("cpu")),
        max_norm=_MAX_NORM,
        state=SimpleNamespace(
            optimizer=optimizer, step=4, lr_scheduler=SimpleNamespace(lr=lambda step: step * 0.1)
        ),
    )
    pending: Any = SimpleNamespace(divisor_and_skip=lambda max_norm: (max_norm, "skip"))
    assert _update_on_device(job, pending) is all(conditions)
    assert steps == [("skip", 0.4, _MAX_NORM)] * all(conditions)


@pytest.mark.parametrize(
    ("why", "num_replicas", "is_saved"),
    [
        (TrainingDiverged("It diverged."), 2, True),
        (MachineFault("A machine is faulty."), 1, True),
        (MachineFault("A machine is faulty."), 2, False),
        (DamagedState("Memory is damaged."), 1, False),
    ],
    ids=str,
)
def test_a_run_that_ends_saves_its_state_unless_it_is_damaged_or_others_have_it(
    why: Any, num_replicas: int, is_saved: bool
) -> None:
    saved: list[bool] = []
    checkpoints = SimpleNamespace(final_save=lambda finished: saved.append(finished) or "step-4")
    job: Any = SimpleNamespace(
        replicas=SimpleNamespace(close=lambda: None),
        phases=SimpleNamespace(enter=lambda phase: None),
        state=SimpleNamespace(step=4, statistics=SimpleNamespace(reset_counts=lambda: None)),
        checkpoints=checkpoints,
    )
    report: Any = SimpleNamespace(num_replicas=num_replicas)
    with pytest.raises(type(why)) as raised:
        _end(job, report, why)
    assert saved == [False] * is_saved
    ending = " The weights are those of step 4, saved in step-4." * is_saved
    assert str(raised.value) == f"{why}{ending}"
