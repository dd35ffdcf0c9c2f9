"""What `redistribute` does beside moving: given tensors, nothing to do, ranks that have no part,
gradients."""

from collections.abc import Callable, Sequence

import pytest
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.pool import WorkerPool
from tests.redistribution import edges

Pools = Callable[[int], WorkerPool]

R, S0, S1, P, AVERAGE = Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")


@pytest.mark.parametrize(
    "case",
    [
        edges.into_given_tensors,
        edges.into_tensors_that_do_not_fit,
        edges.nothing_to_do,
        edges.cuts_of_a_copy,
        edges.outside_of_both_meshes,
        edges.without_the_mesh_of_the_destination,
        edges.no_gradient,
        edges.no_gradient_of_extremes,
        edges.scalar_to_another_mesh_and_back,
        edges.a_shape_that_is_not_the_tensors,
        edges.dims_counted_from_the_end,
        edges.dtypes_of_forward_and_backward,
        edges.strides_of_any_kind,
        edges.averages_of_halves,
    ],
    ids=lambda case: case.__name__,
)
def test_case(case: Callable[[], None], pools: Pools) -> None:
    pools(4).run(case)


@pytest.mark.parametrize(
    ("src", "dst", "expected", "factor"),
    [
        # The gradient of a shard is the same shard of the whole gradient.
        ([S0, R], [R, R], [S0, R], 1),
        ([S0, S0], [R, R], [S0, S0], 1),
        ([R, R], [S0, R], [R, R], 1),
        ([S0, S1], [S1, S0], [S0, S1], 1),
        ([S1, R], [R, S0], [S1, R], 1),
        # Every contribution to a sum has the whole gradient.
        ([P, P], [R, R], [R, R], 1),
        ([P, R], [S0, R], [R, R], 1),
        ([P, S1], [S0, S0], [R, S1], 1),
        ([R, R], [P, R], [R, R], 1),
        # Every contribution to an average has its share.
        ([AVERAGE, R], [R, R], [R, R], 0.5),
        ([AVERAGE, AVERAGE], [S0, S1], [R, R], 0.25),
        # A value is the sum of all its shares, whether the holders have it or must be given it.
        ([R, R], [AVERAGE, R], [R, R], 2),
        ([S0, R], [AVERAGE, R], [S0, R], 2),
    ],
)
def test_gradient(
    src: Sequence[Placement],
    dst: Sequence[Placement],
    expected: Sequence[Placement],
    factor: float,
    pools: Pools,
) -> None:
    pools(4).run(edges.gradient, src, dst, expected, factor)


@pytest.mark.parametrize("holders", [(2, 3), (1, 2)], ids=["disjoint", "sharing a rank"])
@pytest.mark.parametrize("target", [S0, S1, R], ids=str)
def test_gradient_across_meshes(target: Placement, holders: Sequence[int], pools: Pools) -> None:
    pools(4).run(edges.gradient_across_meshes, target, holders)
