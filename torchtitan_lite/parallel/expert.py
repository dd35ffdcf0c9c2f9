"""Expert parallelism: experts are sharded over the `ep` axis, and the matrices of each expert over
`etp` (arXiv:2006.16668). Tokens are dispatched to the ranks that hold their experts, and the
results are combined.

Each rank dispatches the tokens that it holds, however the other parallelisms sharded them, so `ep`
is independent of the degrees of tensor and context parallelism. Routers are balanced over all
ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import local_tensor
from torchtitan_lite.nn.dispatch import take_rows
from torchtitan_lite.nn.moe import Experts, Router
from torchtitan_lite.nn.spec import ModelSpec
from torchtitan_lite.parallel.autograd_collectives import exchange_rows, shard_rows, unshard_rows


def apply(model: nn.Module, spec: ModelSpec, mesh: Mesh, parallelism: ParallelismConfig) -> None:
    """Shard the experts of `model`, which is on the meta device."""
    if not spec.num_experts:
        return
    _see_whole_sequences(model, mesh, parallelism)
    if not has_own_mesh(spec, mesh):
        return
    placing = mesh.expert_mesh["ep", "etp"]
    exchange = _Exchange(
        num_owners=mesh.degrees.ep,
        num_shards=mesh.degrees.etp,
        group=mesh.groups.over(mesh.expert_mesh, "ep", "etp"),
    )
    # Without sequence parallelism all tp ranks have the same tokens; each sends a part of them.
    shares_tokens = mesh.degrees.tp > 1 and not parallelism.enable_sequence_parallel
    sharers = mesh.device_mesh.get_group("tp") if shares_tokens else None
    for module in model.modules():
        if isinstance(module, Experts):
            for name, width_dim in module.WIDTH_DIMS.items():
                placements = [Shard(0), Shard(width_dim)]
                stack = distribute_tensor(getattr(module, name), placing, placements)
                module.register_parameter(name, nn.Parameter(stack))
            module.forward = partial(_forward, module, exchange, sharers)


def has_own_mesh(spec: ModelSpec, mesh: Mesh) -> bool:
    """Whether the experts are sharded over a mesh of their own; else they are sharded as all other
    weights are."""
    return spec.num_experts > 0 and mesh.degrees.ep * mesh.degrees.etp * mesh.degrees.tp > 1


def _forward(
    experts: Experts,
    exchange: "_Exchange",
    sharers: dist.ProcessGroup | None,
    tokens_ND: torch.Tensor,
    counts_X: torch.Tensor,
) -> torch.Tensor:
    """`Experts.forward` for experts on other ranks."""
    if sharers is None:
        return exchange.run(experts, tokens_ND, counts_X)
    num_rows = len(tokens_ND)
    start = sharers.rank() * num_rows // sharers.size()
    stop = (sharers.rank() + 1) * num_rows // sharers.size()
    ends_X = counts_X.cumsum(0)
    own_X = ends_X.clamp(start, stop) - (ends_X - counts_X).clamp(start, stop)
    own_ND = exchange.run(experts, shard_rows(tokens_ND, start, stop, sharers), own_X)
    return unshard_rows(own_ND, start, num_rows, sharers)


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """Dispatch and combine of tokens. Rank `owner * num_shards + shard` of `group` holds one shard
    of each expert of its owner."""

    num_owners: int
    num_shards: int
    group: dist.ProcessGroup

    def run(
        self, experts: Experts, tokens_ND: torch.Tensor, counts_X: torch.Tensor
    ) -> torch.Tensor:
        """Run the experts on this rank's tokens, which are sorted by expert. Returns the results in
        the same order."""
        stacks = [local_tensor(getattr(experts, name)) for name in experts.WIDTH_DIMS]
        shard = (self.group.rank() % self.num_shards, self.num_shards)
        if self.group.size() == 1:
            return experts.compute(tokens_ND, stacks, counts_X, shard)
        # Y: the experts that a rank holds. R: the ranks of the group.
        sent_RY = counts_X.view(self.num_owners, -1).repeat_interleave(self.num_shards, 0)
        received_RY = torch.empty_like(sent_RY)
        dist.all_to_all_single(received_RY, sent_RY, group=self.group)
        # The host waits for the device here, because the sizes of the exchange depend on the
        # counts.
        sent, received = torch.stack([sent_RY.sum(1), received_RY.sum(1)]).tolist()
        incoming_ND = exchange_rows(self._repeated(tokens_ND, sent), sent, received, self.group)
        order_N = _by_expert(received_RY, sum(received))
        places_N = order_N.argsort()
        sorted_ND = take_rows(incoming_ND, order_N, places_N[:, None])
        out_ND = experts.compute(sorted_ND, stacks, received_RY.sum(0), shard)
        outgoing_ND = take_rows(out_ND, places_N, order_N[:, None])
        return self._summed(exchange_rows(outgoing_ND, received, sent, self.group), sent)

    def _repeated(self, tokens_ND: torch.Tensor, sent: list[int]) -> torch.Tensor:
        """Repeat the tokens of each owner for every shard of its experts."""
        if self.num_shards == 1:
            return tokens_ND
        of_owners = tokens_ND.split(sent[:: self.num_shards])
        return torch.cat([tokens for tokens in of_owners for _ in range(self.num_shards)])

    def _summed(self, parts_ND: torch.Tensor, sent: list[int]) -> torch.Tensor:
        """Sum the partial results of the shards of each expert; the inverse of `_repeated`."""
        if self.num_shards == 1:
            return parts_ND
        parts = parts_ND.split(sent)
        owners = range(0, len(parts), self.num_shards)
        return torch.cat([torch.stack(parts[o : o + self.num_shards]).sum(0) for o in owners])


def _by_expert(received_RY: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the order [N] that sorts by expert what is sorted by (rank, expert). `num_tokens` is
    the sum of `received_RY`, N."""
    num_ranks, num_experts = received_RY.shape
    expert_RY = torch.arange(num_experts, device=received_RY.device).expand(num_ranks, -1)
    expert_N = expert_RY.flatten().repeat_interleave(received_RY.flatten(), output_size=num_tokens)
    return expert_N.argsort(stable=True)


def _see_whole_sequences(model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig) -> None:
    """Let routers with a sequence-level balance loss count entire sequences where ranks share
    sequences."""
    axes = ["cp"] if mesh.degrees.cp > 1 else []
    if mesh.degrees.tp > 1 and parallelism.enable_sequence_parallel:
        axes.append("tp")
    if not axes:
        return
    # Also on stages without routers: all ranks create the group together.
    group = mesh.groups.over(mesh.device_mesh, *axes)

    def sum_over_sequence(counts_BX: torch.Tensor) -> torch.Tensor:
        total_BX = counts_BX.clone()
        dist.all_reduce(total_BX, group=group)
        return total_BX

    for module in model.modules():
        if isinstance(module, Router):
            module.sum_over_sequence = sum_over_sequence


class RouterBalance:
    """The load of the routers, counted per rank, summed over all ranks, and balanced by a bias
    (auxiliary-loss-free balancing, arXiv:2408.15664).

    A bias changes only with a committed step, by the counts of all its tokens, so it is equal on
    every rank and every mesh. A model without routers has empty counts.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        num_experts: int,
        mesh: Mesh,
        parallelism: ParallelismConfig,
    ) -> None:
        """`model` is this rank's part of the model; `names` are the routers of the entire model."""
        self._routers = routers_of(model)
        self._names = list(names)
        self._num_experts = num_experts
        # Without sequence parallelism all tp ranks count the same tokens.
        self._copies = 1 if parallelism.enable_sequence_parallel else mesh.degrees.tp

    def counts(self, device: torch.device) -> torch.Tensor:
        """Return this rank's tokens per expert since the last `reset`: float64 [routers * experts],
        0 for routers of other stages. The sum over all ranks is the load of the step."""
        # L: the routers of the model.
        counts_LX = torch.zeros(
            len(self._names), self._num_experts, dtype=torch.float64, device=device
        )
        for name, router in self._routers.items():
            counts_LX[self._names.index(name)] = router.load_X
        return counts_LX.flatten() / self._copies

    def apply(self, counts: torch.Tensor, *, committed: bool) -> dict[str, torch.Tensor]:
        """Update the biases by the summed `counts`, on the CPU, if the step was committed. Returns
        the load [X] of each router of the model, by name."""
        # Integers again: tp ranks that count the same tokens contribute fractions.
        counts_LX = counts.round().view(len(self._names), self._num_experts)
        for name, router in self._routers.items():
            if committed:
                load_X = counts_LX[self._names.index(name)]
                router.update_expert_bias(load_X.to(router.load_X.device, non_blocking=True))
        return dict(zip(self._names, counts_LX, strict=True))

    def reset(self) -> None:
        """Reset the counters."""
        for router in self._routers.values():
            router.load_X.zero_()


def routers_of(model: nn.Module) -> dict[str, Router]:
    """Return the routers of a model by name, in model order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}
