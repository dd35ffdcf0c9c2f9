"""The divisor and the skip that the device computes equal those of the host."""

import math

import pytest
import torch

from torchtitan_lite.anomalies import Action, AnomalyDetector, History
from torchtitan_lite.checkpoint import NUM_SAVE_SIGNALS
from torchtitan_lite.schema.anomalies import AnomaliesConfig
from torchtitan_lite.step.totals import NORM_EPS, PendingTotals

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
    totals = pending.read()
    assert totals.num_targets == num_targets
    detector = AnomalyDetector(AnomaliesConfig(), max_skipped_steps=100)
    assert detector.ignores_history
    decision = detector.decide(totals.mean_loss, totals.grad_norm, History())
    assert skip.item() == (decision.action is not Action.COMMIT)
    if not skip.item():
        factor = min(1.0, _MAX_NORM / (totals.grad_norm + NORM_EPS)) / num_targets
        assert divisor.item() == pytest.approx(1 / factor, rel=1e-6)


def test_spikes_depend_on_the_history() -> None:
    config = AnomaliesConfig(on_spike="skip")
    assert not AnomalyDetector(config, max_skipped_steps=1).ignores_history
