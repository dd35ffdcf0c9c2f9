"""Plans from one layout to another, for a tensor of one shape.

Invariant: a plan is a function of its arguments alone, the same on every rank and independent of
earlier plans.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np
import torch
from torch.distributed.tensor import Partial

from torchtitan_lite.core.errors import LayoutError
from torchtitan_lite.distributed.redistribute.planning.cost import CPU, Costs
from torchtitan_lite.distributed.redistribute.planning.exchange import Exchange
from torchtitan_lite.distributed.redistribute.planning.layout import Layout
from torchtitan_lite.distributed.redistribute.planning.placements import Holder
from torchtitan_lite.distributed.redistribute.planning.transfers import RoundKind, RoundTransfers


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan from one layout to another. Use `plan`."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    exchange: Exchange
    factor: float
    """Factor of the result if averages are involved; else 1."""

    @property
    def rounds(self) -> tuple[RoundKind, ...]:
        """The exchanges in order."""
        return self.exchange.rounds

    @property
    def op(self) -> str:
        """The reduction of partial values."""
        return self.src.reduce_op or self.dst.reduce_op or "sum"

    @property
    def is_scaled_in_reduction(self) -> bool:
        """Whether every element passes through a reduction, which can multiply it by `factor`
        before it is rounded."""
        exchange = self.exchange
        return exchange.rounds[0] == "reduce" and exchange.dst.num_contributions == 1

    @cached_property
    def is_noop(self) -> bool:
        """Whether every holder has exactly its destination already."""
        return self.src == self.dst

    @cached_property
    def _kept_shards(self) -> dict[Holder, bool]:
        return {}

    def keeps_shard(self, holder: Holder) -> bool:
        """Whether a holder's shard of the source is its shard of the destination unchanged."""
        if holder not in self._kept_shards:
            self._kept_shards[holder] = self.is_noop or self._is_same_part(holder)
        return self._kept_shards[holder]

    def _is_same_part(self, holder: Holder) -> bool:
        if self.moved_bytes or self.factor != 1:
            return False
        shape = self.local_shape(holder)
        if self.src.local_shape(self.shape, holder) != shape:
            return False
        # A contribution may also be empty: then nothing is copied to it. Else all elements of the
        # source are, in the order of the dims on both sides.
        copies = [piece for part in self.transfers(holder) for piece in part.copies]
        return sum(piece.stop - piece.start for piece in copies) == prod(shape)

    def local_shape(self, holder: Holder) -> tuple[int, ...]:
        """Return the shape of a holder's shard of the destination."""
        if holder not in self._local_shapes:
            self._local_shapes[holder] = self.dst.local_shape(self.shape, holder)
        return self._local_shapes[holder]

    @cached_property
    def _local_shapes(self) -> dict[Holder, tuple[int, ...]]:
        return {}

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes sent between holders."""
        return 0 if self.is_noop else self.exchange.total_elements * self.dtype.itemsize

    @cached_property
    def _transfers(self) -> dict[Holder, tuple[RoundTransfers, ...]]:
        return {}

    def transfers(self, holder: Holder) -> tuple[RoundTransfers, ...]:
        """Return the transfers of one holder in each round."""
        if holder not in self._transfers:
            self._transfers[holder] = self.exchange.transfers(holder)
        return self._transfers[holder]


@lru_cache(maxsize=4096)
def plan(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    costs: Costs = CPU,
) -> Plan:
    """Compute the exchange from `src` to `dst`.

    `costs` determine whether nodes forward data. Raises LayoutError if a layout does not fit the
    shape, or partial values would need two different reductions.
    """
    src, dst = src.with_num_dims(len(shape)), dst.with_num_dims(len(shape))
    src.check(shape)
    dst.check(shape)
    _check_ops(src, dst, shape, dtype)
    # These are the value where all contributions are equal to it.
    equal = dst.with_replicas(("avg", "min", "max"))
    if equal != dst and src.reduce_op is None:
        copies = Exchange(src, equal, shape)
        if copies.total_elements == 0:
            return Plan(src, dst, shape, dtype, copies, 1.0)
    best = _on_nodes(Exchange(src, dst, shape), costs, dtype.itemsize)
    return Plan(src, dst, shape, dtype, best, _average_factor(src, dst))


def _on_nodes(exchange: Exchange, costs: Costs, itemsize: int) -> Exchange:
    """Return the exchange for the nodes of the holders: with relays if that is cheaper."""
    nodes = costs.nodes()
    if nodes is None:
        return exchange
    src_nodes, dst_nodes = nodes.node_indices(exchange.src.layout.mesh, exchange.dst.layout.mesh)
    if (src_nodes == dst_nodes[0]).all() and (dst_nodes == dst_nodes[0]).all():
        return exchange
    relay = _relays_pay(exchange, costs, src_nodes, dst_nodes, itemsize)
    return exchange.on_nodes(costs.nodes(relay=relay))


def _relays_pay(
    exchange: Exchange,
    costs: Costs,
    src_nodes: np.ndarray,
    dst_nodes: np.ndarray,
    itemsize: int,
) -> bool:
    """Whether sending data once to a node with the most receivers of one shard saves more time
    between nodes than forwarding takes within the node. Closed form: predicting both exchanges
    would take longer than planning one."""
    dst = exchange.dst
    if dst.num_replicas == 1:
        return False
    num_shards = len(dst_nodes) // dst.num_replicas
    shard = dst.part_of * dst.num_contributions + dst.contribution_of
    keys, counts = np.unique(dst_nodes * num_shards + shard, return_counts=True)
    most = int(counts.argmax())
    count, (node, of_node) = int(counts[most]), divmod(int(keys[most]), num_shards)
    if count == 1:
        return False
    part = of_node // dst.num_contributions
    lacking = exchange.elements_beyond(src_nodes == node, part, count)
    saved_bytes = lacking * itemsize * (1 - 1 / count)
    forwarding_s = costs.round_s + (count - 1) * costs.within.latency_s
    forwarding_s += saved_bytes / costs.within.bytes_per_s
    return saved_bytes / costs.between.bytes_per_s > forwarding_s


def _average_factor(src: Layout, dst: Layout) -> float:
    """Return the factor of sums that come from averages or become averages."""
    return _averaged(dst) / _averaged(src)


def _averaged(layout: Layout) -> int:
    """Return the number of holders over which a layout averages."""
    return prod(
        size
        for size, placement in zip(layout.mesh.shape, layout.placements, strict=True)
        if isinstance(placement, Partial) and placement.reduce_op == "avg"
    )


def _check_ops(src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    src_op, dst_op = src.reduce_op, dst.reduce_op
    if src_op and dst_op and src_op != dst_op:
        raise LayoutError(
            f"Cannot redistribute {src} to {dst} for a tensor of shape {shape}: "
            f"Partial({src_op}) cannot become Partial({dst_op}). Redistribute to Replicate or "
            "Shard in between."
        )
    real = dtype.is_floating_point or dtype.is_complex
    averaged = _averaged(src) * _averaged(dst)
    if not real and averaged > 1:
        raise LayoutError(f"{dtype} has no averages ({src} to {dst}). Use sums, or a float dtype.")
    if dtype.is_complex and (src_op or dst_op) in ("min", "max"):
        raise LayoutError(f"{dtype} has no {src_op or dst_op} ({src} to {dst}).")
