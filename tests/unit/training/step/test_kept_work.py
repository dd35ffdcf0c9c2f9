"""What is kept of an aborted step counts only while the state and the others agree."""

import torch

from torchtitan_lite.fault_tolerance.replica import Share
from torchtitan_lite.training.step.kept_work import KeptWork


def _kept() -> KeptWork:
    kept = KeptWork()
    kept.add((3, 100), [range(108, 116)], 4, [], torch.tensor(2.0))
    return kept


def test_rounds_count_at_their_position_only() -> None:
    kept = _kept()
    assert kept.computed((3, 100), 5) == [False, False, True, True, False]
    assert not any(kept.computed((4, 100), 5)) and not any(kept.computed((3, 96), 5))
    kept.add((3, 100), [range(100, 104), range(116, 120)], 4, [], torch.tensor(5.0))
    assert kept.computed((3, 100), 5) == [True, False, True, True, True]
    assert kept.loss == 5.0
    kept.clear()
    assert not any(kept.computed((3, 100), 5)) and kept.loss is None and not kept.rounds


def test_work_that_the_others_do_not_count_on_does_not_fit() -> None:
    kept = _kept()
    assert kept.fits(Share(index=1, count=2, owners=(0, 0, 1, 1, -1)), 1)
    assert not kept.fits(Share(index=1, count=2, owners=(0, 0, 1, 1, -1)), 2), "one lost round"
    assert not kept.fits(Share(index=0, count=2, owners=(0, 0, 1, 1, -1)), 1)
    assert not kept.fits(Share(index=1, count=2, owners=(0, 0, -1, -1, -1)), 1), "it has healed"
    assert not kept.fits(Share(index=1, count=2), 1), "the exchange has failed"
    # One that has joined since has computed nothing.
    assert KeptWork().fits(Share(index=1, count=2, owners=(0, -1, -1)), 1)
