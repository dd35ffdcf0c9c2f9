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
    HolderMesh,
    Layout,
    align_gradient,
    redistribute,
    redistribute_state_dict,
)

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


def _leaf(move: Move) -> DTensor:
    leaf = source(move, 0)
    leaf.requires_grad = True
    return leaf
