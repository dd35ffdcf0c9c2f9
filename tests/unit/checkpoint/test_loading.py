"""Reads of a batch arrive in the live tensors, whatever their dtype."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_lite.checkpoint import loading


def test_tensors_of_another_dtype_are_filled_by_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribute(plans: Any, given: Any, outs: list[torch.Tensor | None]) -> None:
        for plan, out in zip(plans, outs, strict=True):
            if out is not None:
                assert out.dtype == plan.dtype
                out.fill_(3)

    monkeypatch.setattr(loading, "distribute_reads", distribute)
    plan: Any = SimpleNamespace(dtype=torch.float32)
    live = [torch.zeros(2), None, torch.zeros(2, dtype=torch.float64)]
    loading._fill([plan] * 3, [{}] * 3, live)
    assert live[1] is None
    for tensor in (live[0], live[2]):
        assert tensor is not None and tensor.tolist() == [3, 3]
