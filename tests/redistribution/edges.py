"""Cases that workers of a pool run: what `redistribute` does beside moving."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tests.redistribution.processes import Move, assert_arrived, bits, device_mesh, source
from torchtitan_lite.errors import LayoutError, RedistributionError
from torchtitan_lite.redistribute import (
    ExchangeOptions,
    HolderMesh,
    Layout,
    align_gradient,
    redistribute,
    redistribute_state_dict,
)
from torchtitan_lite.redistribute.cost import default_costs

FOUR = HolderMesh.ranks(4)
SHARDED, WHOLE = Layout(FOUR, [Shard(0)]), Layout(FOUR, [Replicate()])
WRONG_OUTS = {
    "another dtype": torch.empty(5, 3, dtype=torch.bfloat16),
    "another shape": torch.empty(3, 5),
    "not contiguous": torch.empty(3, 5).t(),
}


def into_given_tensors() -> None:
    """`out` is what is returned, and holds the result; its memory is what it was."""
    move = Move(SHARDED, WHOLE, (5, 3))
    tensor = source(move, 0)
    mesh = device_mesh(FOUR)
    out = DTensor.from_local(torch.full((5, 3), -1.0), mesh, [Replicate()], run_check=False)
    address = out.to_local().data_ptr()
    assert redistribute(tensor, WHOLE, out=out) is out
    assert_arrived(move, 0, out)
    out.to_local().fill_(-1.0)
    results = redistribute_state_dict({"weight": tensor}, {"weight": WHOLE}, out={"weight": out})
    assert results["weight"] is out and out.to_local().data_ptr() == address
    assert_arrived(move, 0, out)
    # Nothing to move is still something to copy.
    again = DTensor.from_local(torch.zeros(5, 3), mesh, [Replicate()], run_check=False)
    assert redistribute(out, WHOLE, out=again) is again
    assert_arrived(move, 0, again)


def into_tensors_that_do_not_fit() -> None:
    """All ranks refuse before anything moves."""
    tensor = source(Move(SHARDED, WHOLE, (5, 3)), 0)
    for local in WRONG_OUTS.values():
        out = DTensor.from_local(local, device_mesh(FOUR), [Replicate()], run_check=False)
        with pytest.raises(RedistributionError, match="out (has a part of shape|is )"):
            redistribute(tensor, WHOLE, out=out)


def nothing_to_do() -> None:
    """One rank alone can do it: a collective would hang."""
    tensors = {"weight": source(Move(SHARDED, WHOLE, (5, 3)), 0)}
    if dist.get_rank() == 1:
        assert redistribute(tensors["weight"], SHARDED) is tensors["weight"]
        results = redistribute_state_dict(tensors, {"weight": SHARDED})
        assert results["weight"] is tensors["weight"]
        unlisted = redistribute_state_dict(tensors, {})
        assert unlisted["weight"] is tensors["weight"]
    dist.barrier()


def cuts_of_a_copy() -> None:
    """What each rank has already is cut without any other rank."""
    move = Move(WHOLE, SHARDED, (5, 3))
    tensor = source(move, 0)
    if dist.get_rank() == 2:
        result = redistribute(tensor, SHARDED)
        assert result.to_local().shape == (1, 3)
    dist.barrier()


def outside_of_both_meshes() -> None:
    """Ranks 2 and 3 are through before ranks 0 and 1 begin."""
    one, other = HolderMesh.ranks(2), HolderMesh((2,), (1, 0))
    move = Move(Layout(one, [Shard(0)]), Layout(other, [Shard(0)]), (5, 3))
    tensor, mesh, rank = source(move, 0), device_mesh(other), dist.get_rank()
    through = torch.zeros(1)
    if rank < 2:
        dist.recv(through, src=rank + 2)
    result = redistribute(tensor, move.dst, mesh=mesh)
    if rank >= 2:
        dist.send(through, dst=rank - 2)
        assert result.to_local().numel() == 0
    assert_arrived(move, 0, result)


def without_the_mesh_of_the_destination() -> None:
    """Refused on every rank, with what is missing."""
    other = HolderMesh.ranks(2)
    device_mesh(other)
    tensor = source(Move(WHOLE, WHOLE, (5, 3)), 0)
    with pytest.raises(LayoutError, match="Give the DeviceMesh of the destination as mesh"):
        redistribute(tensor, Layout(other, [Shard(0)]))
    with pytest.raises(LayoutError, match="neither a tensor of this rank nor described"):
        redistribute_state_dict({}, {"weight": WHOLE})


def gradient(
    src: Sequence[Placement], dst: Sequence[Placement], expected: Sequence[Placement], factor: float
) -> None:
    """The gradient of (result * coefficients).sum() is `factor` times the coefficients, laid out as
    `expected`."""
    mesh, shape = HolderMesh.ranks(2, 2), (5, 7)
    move = Move(Layout(mesh, src), Layout(mesh, dst), shape)
    leaf = _leaf(move)
    whole = Move(Layout(mesh, [Replicate()] * 2), move.dst, shape)
    parts = [Replicate() if isinstance(p, Partial) else p for p in dst]
    coefficients = redistribute(source(whole, 1), Layout(mesh, parts)).to_local()
    result = redistribute(leaf, move.dst)
    assert result.requires_grad
    (result.to_local() * coefficients).sum().backward()
    assert isinstance(leaf.grad, DTensor)
    given = leaf.grad.to_local()
    wanted = redistribute(source(whole, 1), Layout(mesh, expected)).to_local() * factor
    assert torch.equal(bits(given), bits(wanted)), (given, wanted)


def no_gradient() -> None:
    """Where none flows, there is none, and no rank waits for another."""
    leaf = _leaf(Move(SHARDED, WHOLE, (5, 3)))
    unused = redistribute(leaf, WHOLE)
    assert unused.requires_grad and leaf.grad is None
    with torch.no_grad():
        assert not redistribute(leaf, WHOLE).requires_grad
    plain = source(Move(SHARDED, WHOLE, (5, 3)), 0)
    assert not redistribute(plain, WHOLE).requires_grad
    parameter = nn.Parameter(plain)
    if dist.get_rank() == 0:
        assert align_gradient(parameter) is None and parameter.grad is None
    dist.barrier()


def no_gradient_of_extremes() -> None:
    """Refused where it would be computed wrong."""
    move = Move(Layout(FOUR, [Partial("max")]), WHOLE, (5, 3))
    leaf = _leaf(move)
    result = redistribute(leaf, WHOLE)
    with pytest.raises(LayoutError, match="joined by max, which has no gradient"):
        result.to_local().sum().backward()
    dist.barrier()


def gradient_across_meshes(target: Placement, holders: Sequence[int]) -> None:
    """Of a plain sum over what each rank of the other mesh has."""
    here, there = HolderMesh.ranks(2), HolderMesh((2,), tuple(holders))
    leaf = _leaf(Move(Layout(here, [Shard(0)]), WHOLE, (6, 4)))
    moved = redistribute(leaf, Layout(there, [target]), mesh=device_mesh(there))
    (moved.to_local() * 3).sum().backward()
    assert isinstance(leaf.grad, DTensor) and leaf.grad.shape == (6, 4)
    given = leaf.grad.to_local()
    if dist.get_rank() < 2:
        assert torch.equal(given, torch.full((3, 4), 3.0)), given
    else:
        assert given.numel() == 0


def scalar_to_another_mesh_and_back() -> None:
    """A tensor of no dims that requires a gradient keeps its value, shape and gradient."""
    here, there = HolderMesh.ranks(2), HolderMesh((2,), (2, 3))
    leaf = _leaf(Move(Layout(here, [Replicate()]), WHOLE, ()))
    other = redistribute(leaf, Layout(there, [Replicate()]), mesh=device_mesh(there))
    back = redistribute(other, Layout(here, [Replicate()]), mesh=device_mesh(here))
    assert leaf.shape == other.shape == back.shape == ()
    (back.to_local() * 5).backward()
    assert isinstance(leaf.grad, DTensor) and leaf.grad.shape == ()
    if dist.get_rank() < 2:
        assert torch.equal(back.to_local(), leaf.to_local())
        assert leaf.grad.to_local().item() == 5


def a_shape_that_is_not_the_tensors() -> None:
    """A part that is larger than its layout says is refused on every rank, by redistribute and for
    a state dict."""
    mesh = device_mesh(FOUR)
    local = torch.ones(2, 4)
    tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=local.shape, stride=local.stride()
    )
    # With collectives of the backend, too.
    options = ExchangeOptions(costs=default_costs("cuda"))
    summed = DTensor.from_local(
        local, mesh, [Partial()], run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
    )
    for move in (
        lambda: redistribute(tensor, WHOLE),
        lambda: redistribute(tensor, WHOLE, options=options),
        lambda: redistribute(summed, WHOLE, options=options),
        lambda: redistribute_state_dict({"weight": tensor}, {"weight": WHOLE}),
    ):
        with pytest.raises(LayoutError, match=r"has a part of shape \(2, 4\), and .* gives it"):
            move()
    dist.barrier()


def dims_counted_from_the_end() -> None:
    """Shard(-1) is the last dim, and Partial("prod") a product."""
    tensor = source(Move(SHARDED, WHOLE, (5, 8)), 0)
    moved = redistribute(tensor, Layout(FOUR, [Shard(-1)]))
    assert moved.placements == (Shard(1),) and moved.to_local().shape == (5, 2)
    given = redistribute_state_dict({"weight": tensor}, {"weight": Layout(FOUR, [Shard(-1)])})
    assert torch.equal(given["weight"].to_local(), moved.to_local())
    with pytest.raises(LayoutError, match="-3.* of a tensor of 2 dims. Use -2 to 1"):
        redistribute(tensor, Layout(FOUR, [Shard(-3)]))
    rank = dist.get_rank()
    factors = DTensor.from_local(
        torch.full((3,), float(rank + 1)), device_mesh(FOUR), [Partial("prod")], run_check=False
    )
    assert redistribute(factors, WHOLE).to_local().tolist() == [24.0] * 3


def dtypes_of_forward_and_backward() -> None:
    """The result is in the one, the gradient moves in the other and ends in the tensor's."""
    mesh = Layout(FOUR, [Partial()])
    for backward, expected in ((None, 1.2345), (torch.float16, 1.2345)):
        leaf = _leaf(Move(mesh, WHOLE, (5, 3)))
        result = redistribute(leaf, SHARDED, forward_dtype=torch.bfloat16, backward_dtype=backward)
        assert result.dtype == torch.bfloat16
        weight = torch.full_like(result.to_local(), expected)
        (result.to_local() * weight).sum().backward()
        assert isinstance(leaf.grad, DTensor) and leaf.grad.dtype == torch.float32
        # Made in bfloat16 by the product; float16 has more digits than that.
        wanted = torch.full((5, 3), expected).bfloat16().float()
        assert torch.equal(leaf.grad.to_local(), wanted)


def strides_of_any_kind() -> None:
    """Parts that are transposed, spread out or conjugated move as what they show."""
    for dtype in (torch.float32, torch.float16, torch.complex64):
        wide = torch.arange(24 * 20).reshape(24, 20).to(dtype) + dist.get_rank()
        wide = wide * (1 + 2j) if dtype.is_complex else wide
        for local in (wide.t(), wide[::2], wide[:, ::3], wide[:, 5:].t(), wide.conj()):
            dense = local.resolve_conj().clone(memory_format=torch.contiguous_format)
            for transport in ("shared_memory", "collective"):
                options = ExchangeOptions(transport=transport)
                expected = redistribute(_stacked(dense), WHOLE, options=options).to_local()
                assert torch.equal(expected.chunk(4)[dist.get_rank()], dense)
                moved = redistribute(_stacked(local), WHOLE, options=options)
                assert torch.equal(moved.to_local(), expected)
                # With a tensor of bytes beside it, an element is several words.
                tensors = {"part": _stacked(local), "bytes": _stacked(torch.zeros(8).byte())}
                layouts = dict.fromkeys(tensors, WHOLE)
                both = redistribute_state_dict(tensors, layouts, options=options)
                assert torch.equal(both["part"].to_local(), expected)


def averages_of_halves() -> None:
    """They neither overflow nor are rounded more than once."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for transport in ("shared_memory", "collective"):
        for dtype, scale in ((torch.float16, 6e4), (torch.bfloat16, 1.0)):
            local = (torch.rand(1000, 70, generator=generator) * scale).to(dtype)
            exact = local.double()
            dist.all_reduce(exact)
            tensor = DTensor.from_local(local, device_mesh(FOUR), [Partial("avg")])
            for dst in (WHOLE, SHARDED):
                moved = redistribute(tensor, dst, options=ExchangeOptions(transport=transport))
                whole = redistribute(moved, WHOLE).to_local()
                assert torch.equal(whole, (exact.float() / 4).to(dtype)), (dtype, dst)
    # What becomes contributions again is summed and scaled afterwards.
    tensor = DTensor.from_local(torch.full((4,), 2.0), device_mesh(FOUR), [Partial("avg")])
    half = HolderMesh.ranks(2)
    moved = redistribute(tensor, Layout(half, [Partial()]), mesh=device_mesh(half))
    total = moved.to_local().clone() if rank < 2 else torch.zeros(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4


def _stacked(local: torch.Tensor) -> DTensor:
    """The parts of all ranks, one below the other."""
    shape = torch.Size((local.shape[0] * 4, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, device_mesh(FOUR), [Shard(0)], run_check=False, shape=shape, stride=stride
    )


def _leaf(move: Move) -> DTensor:
    leaf = source(move, 0)
    leaf.requires_grad = True
    return leaf
