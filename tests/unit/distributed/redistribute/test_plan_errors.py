"""Pairs of layouts without a plan, and their errors."""

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchtitan_lite.core.errors import LayoutError, RedistributionError
from torchtitan_lite.distributed.redistribute import ExchangeOptions, HolderMesh, Layout, plan

MESH = HolderMesh.ranks(2)
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.mark.parametrize(
    ("src", "dst", "shape", "dtype", "parts_of_message"),
    [
        (P, Partial("max"), (4,), torch.float32, ["P(sum)", "P(max)", "(4,)", "in between"]),
        (Partial("avg"), Partial("min"), (4,), torch.float32, ["P(avg)", "P(min)", "Partial(sum)"]),
        (Partial("product"), P, (4,), torch.float32, ["P(product)", "P(sum)"]),
        (Partial("max"), R, (4,), torch.complex64, ["complex64 has no max", "P(max)"]),
        (R, Partial("min"), (4,), torch.complex64, ["complex64 has no min", "P(min)"]),
        (Partial("avg"), R, (4,), torch.int64, ["int64 has no averages", "Use sums"]),
        (R, Partial("avg"), (4,), torch.bool, ["bool has no averages", "P(avg)"]),
        (S1, R, (4,), torch.float32, ["dim 1", "(4,)", "1 dims"]),
        (R, S0, (), torch.float32, ["dim 0", "()", "0 dims"]),
    ],
)
def test_no_plan(
    src: Placement,
    dst: Placement,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parts_of_message: list[str],
) -> None:
    with pytest.raises(LayoutError) as error:
        plan(Layout(MESH, [src]), Layout(MESH, [dst]), shape, dtype)
    for part in parts_of_message:
        assert part in str(error.value)


def test_too_small_buckets_are_rejected() -> None:
    with pytest.raises(RedistributionError, match="bucket_bytes = 100 .* at least 16384"):
        ExchangeOptions(bucket_bytes=100)
