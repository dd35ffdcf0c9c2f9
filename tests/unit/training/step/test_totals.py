"""Totals of a step: exact, and the divisor and the skip of the device equal those of the host."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tests.harness.threads import run_on_threads
from tests.unit.conftest import RecordedStreams
from torchtitan_lite.checkpoint import NUM_SAVE_SIGNALS
from torchtitan_lite.config.tables.anomalies import AnomaliesConfig
from torchtitan_lite.core.preemption import StopRequest
from torchtitan_lite.distributed.device import detect_device
from torchtitan_lite.distributed.mesh import Mesh, ParallelDims
from torchtitan_lite.fault_tolerance.replica import SingleReplica
from torchtitan_lite.training.anomalies import AnomalyDetector, StepAction, StepStatistics
from torchtitan_lite.training.step.totals import (
    NORM_EPS,
    PendingTotals,
    StepTotals,
    StepValues,
    reduce_step,
)

_MAX_NORM = 0.5


def _pending(squared_norm: float, loss: float, num_targets: float, copies: int) -> PendingTotals:
    scalars = [squared_norm, 0.0, 0.0, loss, num_targets * copies, 1.0, 0.0, 0.0]
    rest = [0.0] * (NUM_SAVE_SIGNALS + 3)
    return PendingTotals(torch.tensor(scalars + rest, dtype=torch.float64), 3, 0, copies)


@pytest.mark.parametrize("loss", [0.0, 37.5, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("squared_norm", [0.0, 1e-30, 1.0, 1e6, 1e60, math.inf, math.nan])
@pytest.mark.parametrize(("num_targets", "copies"), [(0.0, 1), (1.0, 4), (46.0, 1), (46.0, 4)])
def test_device_and_host_agree(
    squared_norm: float, loss: float, num_targets: float, copies: int
) -> None:
    pending = _pending(squared_norm, loss, num_targets, copies)
    divisor, skip = pending.divisor_and_skip(_MAX_NORM)
    # As fused optimizers require.
    assert divisor.dtype == skip.dtype == torch.float32
    totals = pending.read()
    assert totals.num_targets == num_targets
    detector = AnomalyDetector(AnomaliesConfig(), max_skipped_steps=100)
    assert detector.ignores_history
    decision = detector.decide(totals.mean_loss, totals.grad_norm, StepStatistics())
    assert skip.item() == (decision.action is not StepAction.COMMIT)
    if not skip.item():
        factor = min(1.0, _MAX_NORM / (totals.grad_norm + NORM_EPS)) / num_targets
        assert divisor.item() == pytest.approx(1 / factor, rel=1e-6)


def test_loss_and_norm_are_per_target_token() -> None:
    totals = _pending(squared_norm=36.0, loss=30.0, num_targets=12.0, copies=2).read()
    assert (totals.mean_loss, totals.grad_norm) == (2.5, 0.5)


class _OnGpu(torch.Tensor):
    is_cuda = True  # pyright: ignore[reportAssignmentType]


def test_the_host_reads_totals_of_a_gpu_after_they_have_arrived(streams: RecordedStreams) -> None:
    totals = torch.ones(8 + NUM_SAVE_SIGNALS, dtype=torch.float64).as_subclass(_OnGpu)
    pending = PendingTotals(totals, 0, 0, 1)
    assert streams.log == []
    pending.read()
    assert streams.log == ["host waits for event of main"]


def test_spikes_depend_on_the_history() -> None:
    config = AnomaliesConfig(on_spike="skip")
    assert not AnomalyDetector(config, max_skipped_steps=1).ignores_history


class _Pair(SingleReplica):
    """This replica, and another one with equal values."""

    def reduce(self, parameters: Sequence[nn.Parameter], counts: torch.Tensor) -> None:
        for one in parameters:
            assert one.grad is not None
            one.grad *= 2
        counts *= 2


def test_the_norm_is_that_of_the_gradients_summed_over_replicas(mesh: Mesh) -> None:
    parameter, none = nn.Parameter(torch.zeros(2)), torch.zeros(0, dtype=torch.float64)
    parameter.grad = torch.tensor([3.0, 4.0])
    values = StepValues(
        loss=torch.ones((), dtype=torch.float64),
        num_targets=5,
        cursor=1,
        step=1,
        save_signals=torch.zeros(NUM_SAVE_SIGNALS, dtype=torch.float64),
        work_times=none,
        rank_flags=none,
        router_counts=none,
    )
    totals = reduce_step(values, [parameter], _Pair(), mesh, StopRequest()).read()
    assert (totals.num_targets, totals.num_ranks) == (10, 2)
    assert totals.grad_norm == pytest.approx(10 / 10)


def _values(number: int) -> StepValues:
    none = torch.zeros(0, dtype=torch.float64)
    return StepValues(
        loss=torch.tensor(float(number), dtype=torch.float64),
        num_targets=number,
        cursor=number,
        step=number,
        save_signals=torch.zeros(NUM_SAVE_SIGNALS, dtype=torch.float64),
        work_times=none,
        rank_flags=none,
        router_counts=torch.tensor([number], dtype=torch.float64),
    )


def test_totals_are_sums_over_all_ranks() -> None:
    def reduce() -> StepTotals:
        mesh = Mesh(detect_device("cpu"), ParallelDims(dp_shard=3))
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.full_like(parameter, mesh.rank + 1.0)
        stop = StopRequest()
        stop.was_signaled = mesh.rank == 1
        values = _values(mesh.rank + 1)
        return reduce_step(values, [parameter], SingleReplica(), mesh, stop).read()

    for totals in run_on_threads(3, reduce):
        assert totals.loss == totals.num_targets == totals.cursor_sum == totals.step_sum == 6
        assert totals.num_ranks == 3 and totals.num_signaled == 1
        assert totals.squared_norm == pytest.approx(2 * (1 + 4 + 9), rel=1e-6)
        assert totals.router_counts.tolist() == [6]


def test_large_counts_are_exact(mesh: Mesh) -> None:
    """Float32 has no odd integers of this size."""
    large = (1 << 24) + 1
    totals = reduce_step(_values(large), [], SingleReplica(), mesh, StopRequest()).read()
    assert totals.num_targets == totals.cursor_sum == totals.step_sum == large
    assert totals.router_counts.tolist() == [large]
