"""Owners of matrices: balance, bytes and buckets, from layouts alone."""

import math
import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from tests.unit.conftest import RecordedStreams
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, TensorSpec
from torchtitan_lite.distributed.redistribute.planning.cost import CPU
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.optim import orthogonalization
from torchtitan_lite.optim.newton_schulz import NewtonSchulz
from torchtitan_lite.optim.orthogonalization import (
    Assignment,
    Matrix,
    ShardedOrthogonalization,
    _background,
    _BackgroundStream,
    _in_buckets,
    assign_matrices,
)

ITERATION = NewtonSchulz(steps=5, dtype=torch.bfloat16)
FSDP = Layout(HolderMesh.ranks(4), [Shard(0)])
HSDP = Layout(HolderMesh.ranks(2, 2), [Replicate(), Shard(0)])
FSDP_TP_COLUMNS = Layout(HolderMesh.ranks(2, 2), [Shard(0), Shard(0)], {0: (1, 0)})
FSDP_TP_ROWS = Layout(HolderMesh.ranks(2, 2), [Shard(0), Shard(1)])
EP = Layout(HolderMesh.ranks(4), [Shard(0)])
EP_ETP = Layout(HolderMesh.ranks(2, 2), [Shard(0), Shard(2)])
HSDP_EP = Layout(HolderMesh.ranks(2, 2), [Replicate(), Shard(0)])
LAYER = [(64, 64)] * 4 + [(160, 64), (160, 64), (64, 160)]
SIZE = 2


def spec(layout: Layout, *shape: int) -> TensorSpec:
    return TensorSpec(layout, shape, torch.float32)


def moved(numel: int, holders: int, copies: int) -> int:
    """Bytes of a matrix that `holders` shards have, each `copies` times: the owner lacks all but
    its shard, and then all others lack theirs."""
    return (numel - numel // holders + numel * copies - numel // holders) * SIZE


def least_bytes(assignment: Assignment) -> int:
    """The lower bound for any layout: the rank that has most of a matrix gets the rest, and then
    each rank its shard, however uneven the work of the ranks is."""
    total = 0
    for (layout, shape), count in Counter(
        (matrix.spec.layout, matrix.spec.shape) for matrix in assignment.matrices
    ).items():
        held = [math.prod(layout.local_shape(shape, rank)) for rank in assignment.ranks]
        total += count * (math.prod(shape) - max(held) + sum(held) - max(held)) * SIZE
    return total


@pytest.mark.parametrize(
    ("layout", "holders", "copies"),
    [(FSDP, 4, 1), (HSDP, 2, 2), (FSDP_TP_COLUMNS, 4, 1), (FSDP_TP_ROWS, 4, 1)],
    ids=["fsdp", "hsdp", "fsdp-tp columns", "fsdp-tp rows"],
)
def test_bytes_are_at_the_lower_bound_and_work_is_balanced(
    layout: Layout, holders: int, copies: int
) -> None:
    assignment = assign_matrices([spec(layout, *shape) for shape in LAYER * 8], ITERATION)
    bound = sum(moved(math.prod(shape), holders, copies) for shape in LAYER * 8)
    assert assignment.moved_bytes == least_bytes(assignment) == bound
    work = assignment.flops
    assert sum(work.values()) == 8 * sum(ITERATION.flops(shape) for shape in LAYER)
    assert max(work.values()) == min(work.values())


def test_experts_stay_where_they_are() -> None:
    assignment = assign_matrices([spec(EP, 8, 22, 36), spec(EP, 8, 36, 22)], ITERATION)
    assert assignment.moved_bytes == 0 and not assignment.buckets
    assert [m.owner for m in assignment.matrices] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [m.local_index for m in assignment.matrices] == [0, 1] * 8


def test_an_expert_over_two_ranks_is_owned_by_one_of_them() -> None:
    assignment = assign_matrices([spec(EP_ETP, 8, 22, 36)], ITERATION)
    assert Counter(m.owner for m in assignment.matrices) == {0: 2, 1: 2, 2: 2, 3: 2}
    for index, matrix in enumerate(assignment.matrices):
        assert matrix.owner in ((0, 1) if index < 4 else (2, 3))
    assert assignment.moved_bytes == 8 * moved(22 * 36, 2, 1)


def test_replicas_of_an_expert_share_the_work() -> None:
    assignment = assign_matrices([spec(HSDP_EP, 8, 22, 36)], ITERATION)
    assert Counter(m.owner for m in assignment.matrices) == {0: 2, 1: 2, 2: 2, 3: 2}
    # Only the other replica needs the result.
    assert assignment.moved_bytes == 8 * 22 * 36 * SIZE


def test_dense_matrices_fill_up_what_experts_leave() -> None:
    """Three experts on two of four ranks, so that the other ranks take the dense matrices."""
    experts = Layout(HolderMesh.ranks(4), [Shard(0)])
    assignment = assign_matrices(
        [spec(experts, 2, 64, 64), *(spec(FSDP, 64, 64) for _ in range(6))], ITERATION
    )
    assert assignment.flops == dict.fromkeys(range(4), 2 * ITERATION.flops((64, 64)))
    assert [m.owner for m in assignment.matrices[:2]] == [0, 1]


def test_uneven_shards_move_few_bytes_without_losing_balance() -> None:
    """The last rank has no rows: it would own nothing if bytes were all that counts."""
    specs = [spec(FSDP, 9, 64) for _ in range(8)]
    assert FSDP.local_shape((9, 64), 3) == (0, 64)
    assignment = assign_matrices(specs, ITERATION)
    assert Counter(m.owner for m in assignment.matrices) == {0: 2, 1: 2, 2: 2, 3: 2}
    # The two matrices of rank 3 move entirely, there and back.
    assert assignment.moved_bytes - least_bytes(assignment) == 2 * 2 * 3 * 64 * SIZE


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_has_much_more_than_its_share(seed: int) -> None:
    draw = random.Random(seed)
    placements: list[Placement] = [Replicate(), Shard(0), Shard(1)]
    mesh = HolderMesh.ranks(draw.randint(1, 3), draw.randint(1, 4))
    specs = []
    for _ in range(draw.randint(1, 40)):
        layout = Layout(mesh, [draw.choice(placements) for _ in mesh.shape])
        stack = [draw.randint(1, 6)] if draw.random() < 0.3 else []
        specs.append(spec(layout, *stack, draw.randint(1, 90), draw.randint(1, 90)))
    assignment = assign_matrices(specs, ITERATION)
    work = assignment.flops
    mean = sum(work.values()) / len(work)
    largest = max(m.flops for m in assignment.matrices)
    # Of longest-processing-time-first, whose optimum is at least the mean and the largest.
    assert max(work.values()) <= 4 / 3 * max(mean, largest) + largest / 3
    assert assignment.moved_bytes >= least_bytes(assignment)
    check_buckets(assignment)


def check_buckets(assignment: Assignment) -> None:
    """Every matrix that moves is in one bucket, and no other."""
    in_buckets = [id(m) for bucket in assignment.buckets for m in bucket]
    assert sorted(in_buckets) == sorted(id(m) for m in assignment.matrices if m.moved_bytes)


def test_buckets_are_bounded_and_balanced() -> None:
    specs = [spec(FSDP, *shape) for shape in LAYER * 16]
    assignment = assign_matrices(specs, ITERATION, bucket_bytes=100_000)
    check_buckets(assignment)
    assert len(assignment.buckets) == 4
    shares: list[dict[Holder, int]] = []
    for bucket in assignment.buckets:
        size, work = Counter[Holder](), Counter[Holder]()
        for matrix in bucket:
            size[matrix.owner] += math.prod(matrix.spec.shape) * SIZE
            work[matrix.owner] += matrix.flops
        # At most one matrix more.
        assert max(size.values()) <= 100_000 + 160 * 64 * SIZE
        shares.append(work)
    largest = max(ITERATION.flops(shape) for shape in LAYER)
    assert all(abs(work[a] - work[b]) <= largest for work in shares for a in work for b in work)


def test_small_matrices_are_in_one_bucket() -> None:
    assert len(assign_matrices([spec(FSDP, 8, 8) for _ in range(100)], ITERATION).buckets) == 1


@pytest.mark.matrix
def test_thousands_of_experts_on_hundreds_of_ranks_are_assigned_in_seconds() -> None:
    mesh = HolderMesh.ranks(2, 4, 32)
    experts = Layout(mesh, [Replicate(), Shard(1), Shard(0)])
    dense = Layout(mesh, [Replicate(), Shard(0), Shard(0)])
    specs = [spec(experts, 128, 64, 32)] * 60 + [spec(dense, 512, 512)] * 512
    began = time.perf_counter()
    assignment = assign_matrices(specs, ITERATION)
    assert time.perf_counter() - began < 30
    assert len(assignment.matrices) == 60 * 128 + 512
    # An expert is on 8 of the 256 ranks.
    assert assignment.moved_bytes == least_bytes(assignment)
    mean = sum(assignment.flops.values()) / 256
    assert max(assignment.flops.values()) <= 1.05 * mean


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_an_exchange_reaches_the_step(place: int) -> None:
    """Of the gathering one, or of the scattering one of the last bucket."""

    class Working:
        def run(self, sources: object, outs: object) -> None:
            pass

    class Broken:
        def run(self, sources: object, outs: object) -> None:
            raise RuntimeError("a peer is lost")

    specs = [spec(FSDP, 512, 512) for _ in range(64)]
    assignment = assign_matrices(specs, ITERATION)
    assert len(assignment.buckets) == 4
    identity: Any = SimpleNamespace(orthogonalize_=lambda matrix: None)
    sharded = ShardedOrthogonalization(assignment, identity, rank=0, device=torch.device("cpu"))
    broken = (Broken(), Working()) if place == 0 else (Working(), Broken())
    sharded._exchanges = [(Working(), Working())] * 3 + [broken]  # pyright: ignore
    shards = [torch.zeros(128, 512, dtype=torch.bfloat16) for _ in specs]
    with pytest.raises(RuntimeError, match="a peer is lost"):
        sharded.run(shards)


def test_matrices_are_orthogonalized_after_they_have_arrived() -> None:
    matrix = 3 * torch.eye(64, dtype=torch.bfloat16)
    sent: list[torch.Tensor] = []

    class Gather:
        def run(self, parts: object, wholes: list[torch.Tensor | None]) -> None:
            time.sleep(0.1)
            for whole in wholes:
                if whole is not None:
                    whole.copy_(matrix)

    class Scatter:
        def run(self, wholes: list[torch.Tensor | None], parts: object) -> None:
            sent.extend(whole.clone() for whole in wholes if whole is not None)

    specs = [spec(FSDP, 64, 64) for _ in range(8)]
    assignment = assign_matrices(specs, ITERATION)
    assert len(assignment.buckets) == 1
    sharded = ShardedOrthogonalization(assignment, ITERATION, rank=0, device=torch.device("cpu"))
    sharded._exchanges = [(Gather(), Scatter())]  # pyright: ignore
    sharded.run([torch.zeros(16, 64, dtype=torch.bfloat16) for _ in specs])
    expected = matrix.clone()
    ITERATION.orthogonalize_(expected)
    assert len(sent) == 2 and not torch.equal(expected, matrix)
    for whole in sent:
        torch.testing.assert_close(whole, expected)


def test_the_owner_with_the_most_decides_the_number_of_buckets() -> None:
    matrices = [
        Matrix(
            parameter=number,
            spec=spec(FSDP, 64, 64),
            local_index=None,
            flops=ITERATION.flops((64, 64)),
            owner=int(number == 4),
            bucket=None,
            costs=CPU,
        )
        for number in range(5)
    ]
    in_buckets = list(_in_buckets(matrices, bucket_bytes=64 * 64 * 4))
    assert [matrix.bucket for matrix in in_buckets if matrix.owner == 0] == [0, 1, 2, 3]


def test_streams_wait_for_what_they_read(
    monkeypatch: pytest.MonkeyPatch, streams: RecordedStreams
) -> None:
    monkeypatch.setattr(orthogonalization, "_background_stream", _BackgroundStream)
    with _background(torch.device("cuda")) as background:
        started = background.start(lambda: streams.log.append(f"on {streams.current().name}"))
        assert streams.log == ["side waits for main", "on side"]
        started.wait()
    assert streams.log[2:] == ["main waits for event of side"]
