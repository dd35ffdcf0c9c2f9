"""Variants of a Muon step on one rank: ours, one process, all-gather, and the floor.

- ours: `ShardedOrthogonalization`, which moves each matrix to one owner and back;
- one process: rank 0 orthogonalizes all entire matrices, and the others wait;
- iterations: each rank orthogonalizes the matrices that it owns, which nobody moves: what the ranks
  cost each other by working at the same time on one machine;
- all-gather: every rank gathers every matrix as a DTensor, orthogonalizes it, and keeps its shard;
- bare exchange: two `all_to_all_single` of exactly the bytes that ours moves, one each way, between
  flat buffers.

The variants alternate in one process. A turn is measured from barrier to barrier in wall seconds,
and in CPU seconds of all threads of this process. Gradients differ in every matrix; the shards that
ours and all-gather return are compared with those of the entire matrices bit by bit.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from benchmarks.worker import alternate, cpu_s
from torchtitan_lite.distributed.redistribute import HolderMesh, Layout, TensorSpec
from torchtitan_lite.optim.newton_schulz import NewtonSchulz
from torchtitan_lite.optim.orthogonalization import ShardedOrthogonalization, assign_matrices

Shape = tuple[int, ...]

LAYOUTS: Mapping[str, tuple[tuple[int, ...], list[Placement], list[Placement]]] = {
    # Mesh, with -1 for the other ranks; columns, rows.
    "FSDP": ((-1,), [Shard(0)], [Shard(0)]),
    "HSDP": ((2, -1), [Replicate(), Shard(0)], [Replicate(), Shard(0)]),
    "FSDP x TP": ((-1, 2), [Shard(0), Shard(0)], [Shard(0), Shard(1)]),
}
"""Placements of matrices by columns (wq, w1) and by rows (wo, w2), as in a decoder."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The matrices of a decoder."""

    layers: int
    dim: int
    hidden_dim: int
    experts: int = 0
    """Experts in place of the dense block, sharded over all ranks; 0: none."""

    def shapes(self) -> list[tuple[Shape, bool]]:
        """(shape, whether it is sharded by columns) of each parameter of all layers."""
        stack = (self.experts,) if self.experts else ()
        attention = [((self.dim, self.dim), True)] * 3 + [((self.dim, self.dim), False)]
        up, down = (*stack, self.hidden_dim, self.dim), (*stack, self.dim, self.hidden_dim)
        return [*attention, (up, True), (up, True), (down, False)] * self.layers


def measure_rank(layout: str, model: dict[str, int], dtype: str, rounds: int) -> dict[str, Any]:
    """Alternate the variants on this rank."""
    dist.init_process_group("gloo")
    variants = Variants(layout, Model(**model), getattr(torch, dtype))
    calls = {name: partial(_cost, variants.restore, call) for name, call in variants.calls.items()}
    measured = {
        "costs": alternate(calls, rounds),
        "right": {name: variants.is_right(name) for name in ("ours", "all-gather")},
        "moved_bytes": variants.assignment.moved_bytes,
        "bound_bytes": variants.bound_bytes(),
        "gathered_bytes": variants.gathered_bytes(),
        "exchanged_bytes": variants.exchanged_bytes,
        "flops": list(variants.assignment.flops.values()),
        "buckets": len(variants.assignment.buckets),
        "threads": torch.get_num_threads(),
    }
    dist.destroy_process_group()
    return measured


def _cost(prepare: Callable[[], object], call: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds of `call`."""
    prepare()
    dist.barrier()
    began_s, used_s = time.perf_counter(), cpu_s()
    call()
    used_s = cpu_s() - used_s
    dist.barrier()
    return time.perf_counter() - began_s, used_s


class Variants:
    """The matrices on this rank, and the variants by name."""

    def __init__(self, layout: str, model: Model, dtype: torch.dtype) -> None:
        """Collective: every rank must call it."""
        sizes, columns, rows = LAYOUTS[layout]
        self._rank, world_size = dist.get_rank(), dist.get_world_size()
        rest = world_size // prod(size for size in sizes if size > 0)
        ranks = torch.arange(world_size).view([rest if size < 0 else size for size in sizes])
        names = tuple(f"axis{axis}" for axis in range(ranks.ndim))
        self._mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        flat = DeviceMesh("cpu", torch.arange(world_size), mesh_dim_names=("ep",))
        self._iteration = NewtonSchulz(steps=5, dtype=dtype)
        self._dtype = dtype
        self._places: list[tuple[DeviceMesh, list[Placement]]] = []
        self._specs: list[TensorSpec] = []
        for shape, by_columns in model.shapes():
            is_stack = len(shape) == 3
            mesh = flat if is_stack else self._mesh
            of_matrix = columns if by_columns else rows
            placements: list[Placement] = [Shard(0)] if is_stack else of_matrix
            placed = Layout(HolderMesh.from_device_mesh(mesh), placements)
            self._places.append((mesh, placements))
            self._specs.append(TensorSpec(placed, shape, dtype))
        self.assignment = assign_matrices(self._specs, self._iteration)
        self._sharded = ShardedOrthogonalization(
            self.assignment, self._iteration, rank=self._rank, device=torch.device("cpu")
        )
        numbers = range(len(self._specs))
        self._wholes = [self._whole(index) for index in numbers]
        self._shards = [self._part(index, self._wholes[index]) for index in numbers]
        # What is orthogonalized in place.
        self._own_wholes = [whole.clone() for whole in self._wholes]
        self._own_shards = [shard.clone() for shard in self._shards]
        sent, received = self._counts()
        total = torch.tensor([sum(map(sum, sent))])
        dist.all_reduce(total)
        self.exchanged_bytes = int(total)
        self._buffers = [
            (torch.zeros(sum(out), dtype=torch.uint8), torch.zeros(sum(into), dtype=torch.uint8))
            for out, into in zip(sent, received, strict=True)
        ]
        self._sent, self._received = sent, received
        self._gathered: list[torch.Tensor] = []
        self.calls: dict[str, Callable[[], object]] = {
            "ours": self._ours,
            "one process": self._one_process,
            "iterations": self._iterations,
            "all-gather": self._all_gather,
            "bare exchange": self._bare_exchange,
        }

    def restore(self) -> None:
        """Undo what a variant did in place."""
        for own, saved in zip(
            [*self._own_wholes, *self._own_shards], [*self._wholes, *self._shards], strict=True
        ):
            own.copy_(saved)

    def is_right(self, name: str) -> bool:
        """Whether the shards of a variant are those of the entire matrices, bit by bit."""
        self.restore()
        self.calls[name]()
        results = self._own_shards if name == "ours" else self._gathered
        for index, result in enumerate(results):
            whole = self._whole(index)
            self._orthogonalize(whole)
            if not torch.equal(result, self._part(index, whole)):
                return False
        return True

    def bound_bytes(self) -> int:
        """The lower bound: a rank gets all of a matrix that it does not have, and then every rank
        its shard, counted by hand from the boxes."""
        total = 0
        for spec in self._specs:
            sizes = [prod(spec.layout.local_shape(spec.shape, rank)) for rank in self._ranks()]
            # Experts are entire on their rank.
            if len(spec.shape) == 2:
                total += prod(spec.shape) - max(sizes) + sum(sizes) - max(sizes)
        return total * self._dtype.itemsize

    def gathered_bytes(self) -> int:
        """Bytes if every rank gathers every matrix."""
        missing = (
            prod(spec.shape) - prod(spec.layout.local_shape(spec.shape, rank))
            for spec in self._specs
            for rank in self._ranks()
        )
        return sum(missing) * self._dtype.itemsize

    def _ranks(self) -> range:
        return range(dist.get_world_size())

    def _whole(self, index: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(index)
        return torch.randn(self._specs[index].shape, generator=draws).to(self._dtype)

    def _part(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        spec = self._specs[index]
        (box,) = spec.layout.boxes(spec.shape, self._rank)
        return whole[box.slices].contiguous()

    def _orthogonalize(self, parameter: torch.Tensor) -> None:
        for matrix in parameter if parameter.ndim == 3 else (parameter,):
            self._iteration.orthogonalize_(matrix)

    def _ours(self) -> None:
        self._sharded.run(self._own_shards)

    def _one_process(self) -> None:
        if self._rank == 0:
            for whole in self._own_wholes:
                self._orthogonalize(whole)

    def _iterations(self) -> None:
        counts = dict.fromkeys(range(len(self._specs)), 0)
        for matrix in self.assignment.matrices:
            whole, index = self._own_wholes[matrix.parameter], counts[matrix.parameter]
            counts[matrix.parameter] += 1
            if matrix.owner == self._rank:
                self._iteration.orthogonalize_(whole if whole.ndim == 2 else whole[index])

    def _all_gather(self) -> None:
        self._gathered = []
        for index, (mesh, placements) in enumerate(self._places):
            shape, shard = self._specs[index].shape, self._shards[index]
            sharded = DTensor.from_local(
                shard,
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(shape),
                stride=torch.empty(shape, device="meta").stride(),
            )
            whole = sharded.full_tensor().clone()
            self._orthogonalize(whole)
            self._gathered.append(self._part(index, whole))

    def _bare_exchange(self) -> None:
        for (out, into), sent, received in zip(
            self._buffers, self._sent, self._received, strict=True
        ):
            dist.all_to_all_single(into, out, received, sent)

    def _counts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Bytes that this rank sends to each, and receives from each: to the owners, and back."""
        sent, received = ([[0] * dist.get_world_size() for _ in range(2)] for _ in range(2))
        for matrix in self.assignment.matrices:
            for way, exchange in enumerate((matrix.to_owner, matrix.from_owner)):
                for part in exchange.transfers(self._rank):
                    for pieces, counts in ((part.sends, sent[way]), (part.receives, received[way])):
                        for piece in pieces:
                            assert isinstance(piece.peer, int)
                            counts[piece.peer] += (piece.stop - piece.start) * self._dtype.itemsize
        return sent, received
