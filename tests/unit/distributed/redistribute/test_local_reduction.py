"""Partial values of one rank are reduced in enough precision, and scaled once."""

import math

import pytest
import torch

from torchtitan_lite.distributed.redistribute.execution import program
from torchtitan_lite.distributed.redistribute.execution.execute import _scale_
from torchtitan_lite.distributed.redistribute.execution.program import LocalReduction


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


_OPERATIONS = {"sum": sum, "product": math.prod, "min": min, "max": max}


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("op", _OPERATIONS)
@pytest.mark.parametrize(
    ("dtype", "raw"),
    [
        (torch.bfloat16, torch.int16),
        (torch.float32, torch.int32),
        (torch.float64, torch.int64),
    ],
)
def test_contributions_are_reduced(
    dtype: torch.dtype, raw: torch.dtype, op: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_WIDE_ELEMENTS", 4)
    draws = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 5, generator=draws).to(dtype) for _ in range(3)]
    lists = zip(*(one.double().flatten().tolist() for one in values), strict=True)
    expected = torch.tensor([_OPERATIONS[op](given) * factor for given in lists])
    into, *others = (one.clone().view(raw) for one in values)
    LocalReduction(dtype, op, factor).apply_(into, others)
    torch.testing.assert_close(
        into.view(dtype).flatten(), expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_results_of_all_widths_are_scaled(dtype: torch.dtype) -> None:
    out = torch.tensor([2.0, -4.0]).to(dtype)
    _scale_(out, 0.5)
    assert out.float().tolist() == [1.0, -2.0]
