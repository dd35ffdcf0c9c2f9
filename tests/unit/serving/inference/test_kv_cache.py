"""Memory of caches: freed before it is allocated anew, and without what was there before."""

import weakref
from typing import Any

import pytest
import torch

from torchtitan_lite.serving.inference.kv_cache import _CachedCarry, _CachedStates


def test_old_memory_is_freed_before_new_memory_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: Any = object.__new__(_CachedStates)
    states._shapes, states._dtype, states._device = [(1, 4)], torch.float32, torch.device("cpu")
    states._caches = ()
    states.allocate(2, 8)
    former, zeros = weakref.ref(next(iter(states._caches))), torch.zeros

    def allocated(*shape: Any, **kind: Any) -> torch.Tensor:
        assert former() is None
        return zeros(*shape, **kind)

    monkeypatch.setattr(torch, "zeros", allocated)
    states.allocate(2, 16)
    assert states.num_bytes == 2 * 16 * 4 * 4


def test_a_new_batch_has_no_padding_of_the_last() -> None:
    carry: Any = object.__new__(_CachedCarry)
    carry._input_shape, carry._state_shape = (3, 2), (1, 2)
    carry._dtype, carry._device = torch.float32, torch.device("cpu")
    carry.counts_B = torch.tensor([1, 2])
    carry.allocate(4, 8)
    assert carry.counts_B is None and carry._state_BHEG.shape == (4, 1, 2)


def test_positions_behind_the_end_of_a_sequence_are_padding() -> None:
    carry: Any = object.__new__(_CachedCarry)
    carry._device, carry.counts_B = torch.device("cpu"), torch.tensor([0, 1, 3])
    padding_BS = carry.is_padding(3)
    assert padding_BS.tolist() == [[True] * 3, [False, True, True], [False] * 3]
