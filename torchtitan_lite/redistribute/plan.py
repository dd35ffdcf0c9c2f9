"""Plans from one layout to another, for a tensor of one shape.

Invariant: a plan is a function of its arguments alone, the same on every rank and independent of
earlier plans.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

import torch
from torch.distributed.tensor import Partial

from torchtitan_lite.errors import LayoutError
from torchtitan_lite.redistribute.collective_search import Collective, cheapest_steps
from torchtitan_lite.redistribute.cost import CPU, Costs, exchange_seconds
from torchtitan_lite.redistribute.exchange import Exchange
from torchtitan_lite.redistribute.layout import Layout
from torchtitan_lite.redistribute.placements import Holder
from torchtitan_lite.redistribute.transfers import RoundKind, RoundTransfers

Objective = Literal["time", "bytes"]


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
    costs: Costs
    steps: "tuple[Plan | Collective, ...]" = ()
    """Steps in place of the single exchange, if faster."""

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
        copies = [piece for part in self.transfers(holder) for piece in part.copies]
        whole = tuple(((0, 0, length),) for length in shape)
        # A contribution may also be empty: then nothing is copied to it.
        is_filled = sum(piece.stop - piece.start for piece in copies) == prod(shape)
        return is_filled and all(piece.segments == whole for piece in copies)

    def local_shape(self, holder: Holder) -> tuple[int, ...]:
        """Bytes of a holder's shard of the destination."""
        if holder not in self._local_shapes:
            self._local_shapes[holder] = self.dst.local_shape(self.shape, holder)
        return self._local_shapes[holder]

    @cached_property
    def _local_shapes(self) -> dict[Holder, tuple[int, ...]]:
        return {}

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes sent between holders."""
        if self.steps:
            return sum(step.moved_bytes for step in self.steps)
        return 0 if self.is_noop else self.exchange.total_elements * self.dtype.itemsize

    @cached_property
    def predicted_s(self) -> float:
        """Predict the time, by `costs`."""
        if self.is_noop:
            return 0.0
        if self.steps:
            return sum(
                step.predicted_s if isinstance(step, Plan) else step.seconds(self.costs)
                for step in self.steps
            )
        return exchange_seconds(self.exchange, self.costs, self.dtype.itemsize)

    @cached_property
    def intermediate_bytes(self) -> int:
        """Bytes of the largest shard of an intermediate layout."""
        sizes = (step.dst.max_local_numel(self.shape) for step in self.steps[:-1])
        return max(sizes, default=0) * self.dtype.itemsize

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
    objective: Objective = "time",
    max_intermediate_bytes: int | None = None,
    single_exchange: bool = False,
) -> Plan:
    """Compute the cheapest plan from `src` to `dst`.

    `objective` is the predicted time, or the moved bytes, those between nodes first. No
    intermediate layout takes more than `max_intermediate_bytes` per rank beside source, destination
    and buffers. `single_exchange` requests a plan that can be fused with those of other tensors.
    Raises LayoutError if a layout does not fit the shape, or partial values would need two
    different reductions.
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
            return Plan(src, dst, shape, dtype, copies, 1.0, costs)
    best = _on_nodes(Exchange(src, dst, shape), costs, objective, dtype.itemsize)
    direct = Plan(src, dst, shape, dtype, best, average_factor(src, dst), costs)
    if single_exchange or objective == "bytes" or not _others_may_win(direct):
        return direct

    def exchange_s(layout: Layout) -> float:
        return plan(layout, dst, shape, dtype, costs=costs, single_exchange=True).predicted_s

    way = cheapest_steps(
        src, dst, shape, dtype, costs, direct.predicted_s, exchange_s, max_intermediate_bytes
    )
    if way is None:
        return direct
    steps: list[Plan | Collective] = []
    here = src
    for step in way:
        steps.append(
            step.collective or plan(here, step.dst, shape, dtype, costs=costs, single_exchange=True)
        )
        here = step.dst
    return replace(direct, steps=tuple(steps))


def _on_nodes(exchange: Exchange, costs: Costs, objective: Objective, itemsize: int) -> Exchange:
    """Return the exchange for the nodes of the holders: with relays if that is cheaper."""
    nodes = costs.nodes()
    src, dst = exchange.src.layout, exchange.dst.layout
    if nodes is None or len({nodes.of(h) for h in (*src.mesh.holders, *dst.mesh.holders)}) == 1:
        return exchange

    plain = Exchange(src, dst, exchange.shape, nodes)
    relayed = Exchange(src, dst, exchange.shape, costs.nodes(relay=True))
    if objective == "bytes":
        return relayed
    return min(plain, relayed, key=lambda e: exchange_seconds(e, costs, itemsize))


def _others_may_win(direct: Plan) -> bool:
    """Whether collectives of the backend could be faster: not across meshes, and not if they start
    later and are slower."""
    costs = direct.costs
    if direct.src.mesh != direct.dst.mesh or direct.is_noop:
        return False
    slower = (
        costs.collective_s >= costs.round_s * len(direct.rounds)
        and costs.collective_within.latency_s >= costs.within.latency_s
        and costs.collective_within.bytes_per_s <= costs.within.bytes_per_s
    )
    return costs.nodes() is not None or not slower


def average_factor(src: Layout, dst: Layout) -> float:
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
    given, wanted = src.reduce_op, dst.reduce_op
    if given and wanted and given != wanted:
        raise LayoutError(
            f"Cannot redistribute {src} to {dst} for a tensor of shape {shape}: "
            f"Partial({given}) cannot become Partial({wanted}). Redistribute to Replicate or Shard "
            "in between."
        )
    real = dtype.is_floating_point or dtype.is_complex
    averaged = _averaged(src) * _averaged(dst)
    if not real and averaged > 1:
        raise LayoutError(f"{dtype} has no averages ({src} to {dst}). Use sums, or a float dtype.")
    if dtype.is_complex and (given or wanted) in ("min", "max"):
        raise LayoutError(f"{dtype} has no {given or wanted} ({src} to {dst}).")
