"""Context parallelism: the ranks of the `cp` axis share each sequence.

Everything but attention works position by position. Attention exchanges keys and values:

- allgather: every rank gathers all keys and values, and masks those that it must not attend to;
- alltoall: they travel in a ring, and partial results are merged by their log-sum-exp (ring
  attention, arXiv:2310.01889), so that no rank ever holds them all;
- ulysses: heads are exchanged for positions, so that each rank holds entire sequences of some heads
  (arXiv:2309.14509).

Layer: above nn and mesh.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite.mesh import Mesh
from torchtitan_lite.nn.attention import Attention, AttentionMask, attention_mask
from torchtitan_lite.parallel.autograd_collectives import all_gather, all_to_all
from torchtitan_lite.schema.parallelism import ParallelismConfig
from torchtitan_lite.spec import Microbatch
from torchtitan_lite.torch_compat import attention_backward, attention_with_lse

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class SequenceSharding:
    """How sequences are sharded over the ranks of a cp group."""

    num_ranks: int
    rank: int
    head_tail: bool

    def order(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions [S] in the order in which the ranks hold them, by rank."""
        return sequence_order(length, self.num_ranks, self.head_tail, device)

    def own(self, length: int, device: torch.device) -> torch.Tensor:
        """Return the positions [S / ranks] that this rank holds."""
        return self.order(length, device).chunk(self.num_ranks)[self.rank]

    def shard(self, batch: Microbatch) -> Microbatch:
        """Return this rank's positions of a microbatch. `documents_BS` is not sharded, because
        attention masks the positions of the other ranks by it."""
        if self.num_ranks == 1:
            return batch
        own = self.own(batch.tokens_BS.shape[1], batch.tokens_BS.device)
        return replace(
            batch,
            tokens_BS=batch.tokens_BS[:, own],
            targets_BS=batch.targets_BS[:, own],
            positions_BS=batch.positions_BS[:, own],
        )


@cache
def sequence_order(
    length: int, num_ranks: int, head_tail: bool, device: torch.device = _CPU
) -> torch.Tensor:
    """Return the positions [S], int64, in the order in which the ranks hold them.

    Raises ValueError if the chunks would have unequal lengths.
    """
    pieces = 2 * num_ranks if head_tail else num_ranks
    if length % pieces:
        raise ValueError(f"A sequence of {length} positions does not divide into {pieces} chunks.")
    # No loop, and no other tensor of full length: fresh memory dominates the cost.
    order = torch.arange(num_ranks, device=device)
    if head_tail:
        order = torch.stack([order, pieces - 1 - order], dim=1).flatten()
    piece_length = length // pieces
    within = torch.arange(piece_length, device=device)
    return (order[:, None] * piece_length + within).flatten()


class RingKernel(nn.Module):
    """Ring attention: causal attention over keys and values that are sharded over a group."""

    def __init__(self, sharding: SequenceSharding, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._sharding = sharding
        self._group = group

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: object
    ) -> torch.Tensor:
        return _Ring.apply(q_BHSE, k_BKSE, v_BKSE, self._sharding, self._group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sharding: SequenceSharding, group):  # type: ignore[override]
        q, passing = q.contiguous(), torch.stack([k, v])
        out = torch.zeros_like(q)
        lse = q.new_full(
            q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32)
        )
        for turn in range(sharding.num_ranks):
            arriving, requests = _pass_on(passing, group, last=turn == sharding.num_ranks - 1)
            seen = _attending(sharding, turn, q.shape[2])
            if seen is not None:
                queries, keys, causal = seen
                k_part, v_part = (_repeat(x[:, :, keys], q) for x in passing)
                part, part_lse = attention_with_lse(q[:, :, queries], k_part, v_part, causal)
                merged = torch.logaddexp(lse[:, :, queries], part_lse)
                old = (lse[:, :, queries] - merged).exp()[..., None]
                new = (part_lse - merged).exp()[..., None]
                out[:, :, queries] = (out[:, :, queries] * old + part * new).to(out.dtype)
                lse[:, :, queries] = merged
            passing = _arrived(arriving, requests)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sharding, ctx.group = sharding, group
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        sharding, group = ctx.sharding, ctx.group
        grad_out = grad_out.contiguous()
        passing = torch.stack([k, v])
        grad_q = torch.zeros_like(q)
        # Gradients travel one turn behind their keys and values, and reach their owner after the
        # last turn.
        grads = torch.zeros_like(passing)
        for turn in range(sharding.num_ranks):
            last = turn == sharding.num_ranks - 1
            arriving, requests = _pass_on(passing, group, last=last)
            seen = _attending(sharding, turn, q.shape[2])
            if seen is not None:
                queries, keys, causal = seen
                k_part, v_part = (_repeat(x[:, :, keys], q) for x in passing)
                part_q, part_k, part_v = attention_backward(
                    grad_out[:, :, queries],
                    q[:, :, queries],
                    k_part,
                    v_part,
                    out[:, :, queries],
                    lse[:, :, queries],
                    causal,
                )
                grad_q[:, :, queries] += part_q
                for row, part in enumerate((part_k, part_v)):
                    grads[row][:, :, keys] += part.unflatten(1, (k.shape[1], -1)).sum(2)
            passing = _arrived(arriving, requests)
            grads = _arrived(*_pass_on(grads, group, last=False))
        return grad_q, grads[0], grads[1], None, None


def _attending(
    sharding: SequenceSharding, turn: int, length: int
) -> tuple[slice, slice, bool] | None:
    """Return the queries of this rank that attend in this turn, the keys that they attend to, and
    whether causally; None if no query does."""
    source = (sharding.rank - turn) % sharding.num_ranks
    everything, half = slice(0, length), length // 2
    if source == sharding.rank:
        return everything, everything, True
    if not sharding.head_tail:
        return (everything, everything, False) if source < sharding.rank else None
    if source < sharding.rank:
        return everything, slice(0, half), False
    return slice(half, length), everything, False


def _repeat(x_BKSE: torch.Tensor, q_BHSE: torch.Tensor) -> torch.Tensor:
    """Repeat each key/value head for every query head that shares it."""
    return x_BKSE.repeat_interleave(q_BHSE.shape[1] // x_BKSE.shape[1], dim=1)


def _pass_on(
    x: torch.Tensor, group: dist.ProcessGroup, *, last: bool
) -> tuple[torch.Tensor, list[dist.Work]]:
    """Start sending `x` to the next rank and receiving from the previous one, unless `last`."""
    if last:
        return x, []
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(x)
    following = dist.get_global_rank(group, (rank + 1) % size)
    previous = dist.get_global_rank(group, (rank - 1) % size)
    operations = [
        dist.P2POp(dist.isend, x.contiguous(), following, group),
        dist.P2POp(dist.irecv, arriving, previous, group),
    ]
    return arriving, dist.batch_isend_irecv(operations)


def _arrived(arriving: torch.Tensor, requests: list[dist.Work]) -> torch.Tensor:
    for request in requests:
        request.wait()
    return arriving


def sequence_sharding(mesh: Mesh, parallelism: ParallelismConfig) -> SequenceSharding:
    """Return how `mesh` shards sequences."""
    return SequenceSharding(
        num_ranks=mesh.degrees.cp,
        rank=mesh.device_mesh.get_local_rank("cp"),
        head_tail=parallelism.context_parallel_load_balancer == "headtail",
    )


def apply(model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig) -> None:
    """Replace the attention kernels of `model` by those that exchange keys and values."""
    if mesh.degrees.cp == 1:
        return
    sharding = sequence_sharding(mesh, parallelism)
    group = mesh.device_mesh.get_group("cp")
    method = parallelism.context_parallel_rotate_method
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, AttentionMask):
                mask = _ShardedMask(child, sharding, whole=method == "ulysses")
                setattr(module, name, _NoMask() if method == "alltoall" else mask)
        if isinstance(module, Attention):
            inner = module.kernel
            if method == "allgather":
                module.kernel = _AllGatherKernel(inner, group)
            elif method == "alltoall":
                module.kernel = RingKernel(sharding, group)
            else:
                module.kernel = _UlyssesKernel(inner, sharding, group)


class _NoMask(nn.Module):
    """Ring attention masks by itself."""

    def forward(self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None) -> None:
        return None


class _ShardedMask(nn.Module):
    """The mask of this rank's positions against all positions in the order of the ranks; with
    `whole`, the mask of entire sequences."""

    def __init__(self, inner: AttentionMask, sharding: SequenceSharding, *, whole: bool) -> None:
        super().__init__()
        self._inner = inner
        self._sharding = sharding
        self._whole = whole

    def forward(self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None) -> Any:
        device = positions_BS.device
        length = positions_BS.shape[1] * self._sharding.num_ranks
        if self._whole:
            everywhere = torch.arange(length, device=device).expand(len(positions_BS), -1)
            return self._inner(everywhere, documents_BS)
        order = self._sharding.order(length, device)
        own = self._sharding.own(length, device)
        return attention_mask(own, order, documents_BS, self._inner.backend)


class _AllGatherKernel(nn.Module):
    """Attention of this rank's positions over the gathered keys and values."""

    def __init__(self, inner: nn.Module, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self._inner = inner
        self._group = group

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        both = torch.stack([k_BKSE, v_BKSE])
        gathered_N2BKSE = all_gather(both, self._group)
        k_all, v_all = gathered_N2BKSE.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return self._inner(q_BHSE, k_all, v_all, mask)


class _UlyssesKernel(nn.Module):
    """Attention over entire sequences, for some of the heads."""

    def __init__(
        self, inner: nn.Module, sharding: SequenceSharding, group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self._inner = inner
        self._sharding = sharding
        self._group = group

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        num_ranks, num_kv_heads = self._sharding.num_ranks, k_BKSE.shape[1]
        if num_kv_heads % num_ranks:
            # Fewer key/value heads than ranks: each rank gets a copy of the head that it needs.
            copies = q_BHSE.shape[1] // num_kv_heads
            k_BKSE = k_BKSE.repeat_interleave(copies, dim=1)
            v_BKSE = v_BKSE.repeat_interleave(copies, dim=1)
        length = q_BHSE.shape[2] * num_ranks
        order = self._sharding.order(length, q_BHSE.device)
        q, k, v = (self._to_heads(x, order.argsort()) for x in (q_BHSE, k_BKSE, v_BKSE))
        out_BHSE = self._inner(q, k, v, mask)
        return self._to_positions(out_BHSE, order)

    def _to_heads(self, x_BHSE: torch.Tensor, natural_S: torch.Tensor) -> torch.Tensor:
        """All heads of own positions -> own heads of all positions, in their natural order."""
        rows = x_BHSE.unflatten(1, (self._sharding.num_ranks, -1)).movedim(1, 0)
        received_NBHSE = all_to_all(rows, self._group)
        return received_NBHSE.movedim(0, 2).flatten(2, 3)[:, :, natural_S]

    def _to_positions(self, x_BHSE: torch.Tensor, order_S: torch.Tensor) -> torch.Tensor:
        """Own heads of all positions -> all heads of own positions."""
        rows = x_BHSE[:, :, order_S].unflatten(2, (self._sharding.num_ranks, -1)).movedim(2, 0)
        received_NBHSE = all_to_all(rows, self._group)
        return received_NBHSE.movedim(0, 1).flatten(1, 2)
