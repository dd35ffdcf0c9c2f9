"""Expert parallelism: the experts of a mixture are shared out over the `ep` axis, and each expert's
matrices are cut over `etp` (arXiv:2006.16668). A copy of a token travels to the ranks that hold its
expert, and its results come back.

Every rank sends the tokens that it has, whichever parallelism gave them to it, so the ranks of
`ep` may be any of those that share the weights otherwise: neither the degree of tensor nor that of
context parallelism matters here. Layer: above nn, mesh and spec; `collectives`.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtitan_lite.mesh import Mesh
from torchtitan_lite.nn.moe import Experts, Router, grouped_swiglu
from torchtitan_lite.nn.rows import take_rows
from torchtitan_lite.parallel.collectives import exchange_rows, part_of_rows, rows_of_parts
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.spec import ModelSpec


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh, parallelism: ParallelismConfig) -> None:
    """Share out the experts of `model`, which is on the meta device."""
    if not spec.num_experts:
        return
    _see_whole_sequences(model, mesh, parallelism)
    if not has_own_mesh(spec, mesh):
        return
    placing = mesh.expert_mesh["ep", "etp"]
    exchange = _Exchange(
        num_owners=mesh.degrees.ep,
        cuts=mesh.degrees.etp,
        group=mesh.groups.over(mesh.expert_mesh, "ep", "etp"),
    )
    # Without sequence parallelism all tp ranks have the same tokens; each sends a part of them.
    shares_tokens = mesh.degrees.tp > 1 and not parallelism.enable_sequence_parallel
    sharers = mesh.device_mesh.get_group("tp") if shares_tokens else None
    for module in model.modules():
        if isinstance(module, Experts):
            for name, width_dim in Experts.WIDTH_DIMS.items():
                placements = [Shard(0), Shard(width_dim)]
                stack = distribute_tensor(getattr(module, name), placing, placements)
                module.register_parameter(name, nn.Parameter(stack))
            module.forward = partial(_forward, module, exchange, sharers)


def has_own_mesh(spec: ModelSpec, mesh: Mesh) -> bool:
    """Whether the experts' weights lie on the experts' own view of the ranks; else they are sharded
    as all other weights are."""
    return spec.num_experts > 0 and mesh.degrees.ep * mesh.degrees.etp * mesh.degrees.tp > 1


def _forward(
    experts: Experts,
    exchange: "_Exchange",
    sharers: dist.ProcessGroup | None,
    tokens_ND: torch.Tensor,
    counts_X: torch.Tensor,
) -> torch.Tensor:
    """`Experts.forward`, with the experts elsewhere."""
    if sharers is None:
        return exchange.run(experts, tokens_ND, counts_X)
    num_rows = len(tokens_ND)
    start = sharers.rank() * num_rows // sharers.size()
    stop = (sharers.rank() + 1) * num_rows // sharers.size()
    ends_X = counts_X.cumsum(0)
    own_X = ends_X.clamp(start, stop) - (ends_X - counts_X).clamp(start, stop)
    own_ND = exchange.run(experts, part_of_rows(tokens_ND, start, stop, sharers), own_X)
    return rows_of_parts(own_ND, start, num_rows, sharers)


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """The way of tokens to their experts and back. Rank `owner * cuts + cut` of `group` holds one
    cut of each expert of its owner."""

    num_owners: int
    cuts: int
    group: dist.ProcessGroup

    def run(
        self, experts: Experts, tokens_ND: torch.Tensor, counts_X: torch.Tensor
    ) -> torch.Tensor:
        """Tokens of this rank, sorted by expert -> their results in the same order."""
        stacks = (_local(experts.w1), _local(experts.w2), _local(experts.w3))
        if self.group.size() == 1:
            return grouped_swiglu(tokens_ND, *stacks, counts_X)
        # Y: the experts that a rank holds. R: the ranks of the group.
        sent_RY = counts_X.view(self.num_owners, -1).repeat_interleave(self.cuts, 0)
        received_RY = torch.empty_like(sent_RY)
        dist.all_to_all_single(received_RY, sent_RY, group=self.group)
        # The host waits here for the device: only the counts tell how much travels.
        sent, received = torch.stack([sent_RY.sum(1), received_RY.sum(1)]).tolist()
        incoming_ND = exchange_rows(self._copied(tokens_ND, sent), sent, received, self.group)
        order_N = _by_expert(received_RY)
        places_N = order_N.argsort()
        sorted_ND = take_rows(incoming_ND, order_N, places_N[:, None])
        out_ND = grouped_swiglu(sorted_ND, *stacks, received_RY.sum(0))
        outgoing_ND = take_rows(out_ND, places_N, order_N[:, None])
        return self._summed(exchange_rows(outgoing_ND, received, sent, self.group), sent)

    def _copied(self, tokens_ND: torch.Tensor, sent: list[int]) -> torch.Tensor:
        """Each owner's tokens once for every cut of its experts."""
        if self.cuts == 1:
            return tokens_ND
        of_owners = tokens_ND.split(sent[:: self.cuts])
        return torch.cat([tokens for tokens in of_owners for _ in range(self.cuts)])

    def _summed(self, parts_ND: torch.Tensor, sent: list[int]) -> torch.Tensor:
        """The inverse of `_copied`: the parts that the cuts of an expert give, summed."""
        if self.cuts == 1:
            return parts_ND
        parts = parts_ND.split(sent)
        owners = range(0, len(parts), self.cuts)
        return torch.cat([torch.stack(parts[o : o + self.cuts]).sum(0) for o in owners])


def _by_expert(received_RY: torch.Tensor) -> torch.Tensor:
    """The order [N] that sorts by expert what lies rank after rank, sorted within each."""
    num_ranks, num_experts = received_RY.shape
    expert_RY = torch.arange(num_experts, device=received_RY.device).expand(num_ranks, -1)
    expert_N = expert_RY.flatten().repeat_interleave(received_RY.flatten())
    return expert_N.argsort(stable=True)


def _local(stack: torch.Tensor) -> torch.Tensor:
    assert isinstance(stack, DTensor)
    return stack.to_local()


def _see_whole_sequences(model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig) -> None:
    """Let routers whose loss balances the experts within each sequence count all of it, where the
    ranks share sequences."""
    axes = ["cp"] if mesh.degrees.cp > 1 else []
    if mesh.degrees.tp > 1 and parallelism.enable_sequence_parallel:
        axes.append("tp")
    if not axes:
        return
    # Whatever this stage holds: the ranks make the group together.
    group = mesh.groups.over(mesh.device_mesh, *axes)

    def sum_over_sequence(counts_BX: torch.Tensor) -> torch.Tensor:
        total_BX = counts_BX.clone()
        dist.all_reduce(total_BX, group=group)
        return total_BX

    for module in model.modules():
        if isinstance(module, Router):
            module.sum_over_sequence = sum_over_sequence
