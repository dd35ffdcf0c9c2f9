"""Waiting in collectives is no work, and a rank's loss of time has a cause."""

import time

import pytest
import torch
import torch.distributed as dist

from torchtitan_lite.torch_compat import collective_waits


def test_the_waits_of_torch_are_measured_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _functional_collectives as functional

    originals = dist.Work.wait, functional.wait_tensor
    monkeypatch.setattr(functional, "wait_tensor", lambda tensor: time.sleep(0.02) or tensor)
    replaced = functional.wait_tensor
    with collective_waits() as waits:
        assert waits.seconds == 0
        functional.wait_tensor(torch.zeros(1))
        assert 0.02 <= waits.seconds < 2
        with collective_waits() as inner:
            functional.wait_tensor(torch.zeros(1))
        assert inner.seconds >= 0.02
        assert dist.Work.wait is not originals[0]
    assert functional.wait_tensor is replaced and dist.Work.wait == originals[0]


def test_measurements_end_in_any_order() -> None:
    from torch.distributed import _functional_collectives as functional

    originals = dist.Work.wait, functional.wait_tensor
    first, second = collective_waits(), collective_waits()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert dist.Work.wait is not originals[0]
    second.__exit__(None, None, None)
    assert (dist.Work.wait, functional.wait_tensor) == originals


def test_compiled_code_may_wait() -> None:
    from torch.distributed import _functional_collectives as functional

    def waits_for(tensor: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(tensor) + 1

    with collective_waits():
        compiled = torch.compile(waits_for, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1)).item() == 1
