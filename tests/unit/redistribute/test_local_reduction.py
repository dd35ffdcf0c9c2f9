"""Partial values are reduced in at least float32, and scaled once."""

import pytest
import torch

from torchtitan_lite.redistribute.execute import _scale_
from torchtitan_lite.redistribute.program import LocalReduction


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_contributions_are_summed_and_rounded_once(dtype: torch.dtype) -> None:
    # In bfloat16, 256 + 1 is 256.
    into = torch.full((3, 5), 256.0, dtype=dtype)
    others = [torch.ones(3, 5, dtype=dtype) for _ in range(4)]
    raw = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    LocalReduction(dtype, "sum", 0.5).apply_(into.view(raw), [one.view(raw) for one in others])
    assert torch.equal(into, torch.full((3, 5), 130.0, dtype=dtype))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]
)
def test_any_dtype_is_scaled(dtype: torch.dtype) -> None:
    out = torch.tensor([1.0, 3.0, -8.0]).to(dtype)
    _scale_(out, 0.5)
    assert out.double().tolist() == [0.5, 1.5, -4.0]
