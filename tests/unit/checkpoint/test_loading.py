"""Reads of a batch arrive in the live tensors, whatever their dtype."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.conftest import Manage, SmallState, run_steps, same
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


def test_a_state_of_several_batches_is_loaded_whole(
    manage: Manage, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, other = SmallState(), SmallState(seed=1)
    run_steps(manage(state), state, 1)
    monkeypatch.setattr(loading, "_BATCH_BYTES", 1)
    manage(other).restore()
    assert same(other.tensors(), state.tensors())


def test_a_batch_ends_with_the_tensor_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_BATCH_BYTES", 8)
    sizes = {"a": 8, "b": 8, "c": 15, "d": 1, "e": 3}
    plans: Any = {
        name: SimpleNamespace(shape=(size,), dtype=torch.uint8) for name, size in sizes.items()
    }
    assert list(loading._batches(plans, 2)) == [["a", "b"], ["c", "d"], ["e"]]
