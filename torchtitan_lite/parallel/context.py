"""Context parallelism: the ranks of the `cp` axis share each sequence.

Everything but attention works position by position. Attention exchanges what queries need of other
positions:

- allgather: every rank gathers the states of all positions (for grouped-query attention keys and
  values), and masks those that it must not attend to;
- alltoall: keys and values travel in a ring, and partial results are merged by their log-sum-exp
  (ring attention, arXiv:2310.01889), so that no rank ever holds them all;
- ulysses: heads are exchanged for positions, so that each rank holds entire sequences of some heads
  (arXiv:2309.14509).

Recurrent layers have one exchange with each of these methods: ranks gather the affine map of the
state over each piece of a sequence, and the last inputs of its convolution, in bytes that do not
depend on the length.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.config.tables.parallelism import ParallelismConfig
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import attention_backward, attention_with_lse
from torchtitan_lite.nn.attention import (
    Attention,
    AttentionMask,
    BlockContext,
    States,
    attention_mask,
)
from torchtitan_lite.nn.recurrent import NO_DOCUMENT, AffineMap, Carry, Recurrence
from torchtitan_lite.nn.rope import RotaryEmbedding
from torchtitan_lite.nn.spec import Microbatch
from torchtitan_lite.parallel.autograd_collectives import all_gather, all_to_all

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

    @property
    def own_pieces(self) -> list[int]:
        """The pieces of consecutive positions that this rank holds, by their place in the
        sequence, in the order in which it holds them."""
        return _pieces_of(self.rank, self.num_ranks, self.head_tail)

    @property
    def piece_order(self) -> list[int]:
        """For each piece of the sequence, its place among those of all ranks in rank order."""
        ranks = range(self.num_ranks)
        held = [p for rank in ranks for p in _pieces_of(rank, self.num_ranks, self.head_tail)]
        return sorted(range(len(held)), key=held.__getitem__)

    def shard(self, batch: Microbatch) -> Microbatch:
        """Return this rank's positions of a microbatch. `documents_BS` is not sharded, because
        attention masks the positions of the other ranks by it."""
        if self.num_ranks == 1:
            return batch
        own = self.own(batch.tokens_BS.shape[1], batch.tokens_BS.device)
        future = {name: value[:, :, own] for name, value in batch.future_inputs.items()}
        return replace(
            batch,
            tokens_BS=batch.tokens_BS[:, own],
            targets_BS=batch.targets_BS[:, own],
            positions_BS=batch.positions_BS[:, own],
            target_values={name: value[:, own] for name, value in batch.target_values.items()},
            **future,
        )


def _pieces_of(rank: int, num_ranks: int, head_tail: bool) -> list[int]:
    return [rank, 2 * num_ranks - 1 - rank] if head_tail else [rank]


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

    def __init__(
        self, sharding: SequenceSharding, group: dist.ProcessGroup, scale: float | None = None
    ) -> None:
        """`scale` multiplies scores, by default 1 / sqrt(E)."""
        super().__init__()
        self._sharding = sharding
        self._group = group
        self._scale = scale

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSG: torch.Tensor, mask: object
    ) -> torch.Tensor:
        return _Ring.apply(q_BHSE, k_BKSE, v_BKSG, self._sharding, self._group, self._scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sharding: SequenceSharding, group, scale):  # type: ignore[override]
        q, passing = q.contiguous(), _packed(k, v)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = q.new_full(
            q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32)
        )
        for turn in range(sharding.num_ranks):
            arriving, requests = _pass_on(passing, group, last=turn == sharding.num_ranks - 1)
            seen = _attending(sharding, turn, q.shape[2])
            if seen is not None:
                queries, keys, causal = seen
                k_part, v_part = (_repeat(x[:, :, keys], q) for x in _unpacked(passing, k, v))
                part, part_lse = attention_with_lse(
                    q[:, :, queries], k_part, _widened(v_part, q), causal, scale
                )
                part = part[..., : v.shape[-1]]
                merged = torch.logaddexp(lse[:, :, queries], part_lse)
                old = (lse[:, :, queries] - merged).exp()[..., None]
                new = (part_lse - merged).exp()[..., None]
                out[:, :, queries] = (out[:, :, queries] * old + part * new).to(out.dtype)
                lse[:, :, queries] = merged
            passing = _arrived(arriving, requests)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sharding, ctx.group, ctx.scale = sharding, group, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        sharding, group = ctx.sharding, ctx.group
        grad_out = _widened(grad_out, q).contiguous()
        out = _widened(out, q)
        passing = _packed(k, v)
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
                k_part, v_part = (_repeat(x[:, :, keys], q) for x in _unpacked(passing, k, v))
                part_q, part_k, part_v = attention_backward(
                    grad_out[:, :, queries],
                    q[:, :, queries],
                    k_part,
                    _widened(v_part, q),
                    out[:, :, queries],
                    lse[:, :, queries],
                    causal,
                    ctx.scale,
                )
                grad_q[:, :, queries] += part_q
                parts = part_k, part_v[..., : v.shape[-1]]
                for grad, part in zip(_unpacked(grads, k, v), parts, strict=True):
                    grad[:, :, keys] += part.unflatten(1, (k.shape[1], -1)).sum(2)
            passing = _arrived(arriving, requests)
            grads = _arrived(*_pass_on(grads, group, last=False))
        return grad_q, *_unpacked(grads, k, v), None, None, None


def _packed(*tensors: torch.Tensor) -> torch.Tensor:
    """Copy tensors of any shapes into one buffer, one behind the other."""
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        # Copies transposed tensors once; flattening them would copy them before.
        return torch.stack(tensors).flatten()
    return torch.cat([tensor.flatten() for tensor in tensors])


def _unpacked(buffer: torch.Tensor, *like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of a buffer [..., N], in the shapes that were packed."""
    parts = buffer.split([prod(tensor.shape) for tensor in like], dim=-1)
    return tuple(part.unflatten(-1, tensor.shape) for part, tensor in zip(parts, like, strict=True))


def _widened(x_BHSG: torch.Tensor, q_BHSE: torch.Tensor) -> torch.Tensor:
    """Append zeros up to the width of the queries, which the fused kernels need of values."""
    missing = q_BHSE.shape[-1] - x_BHSG.shape[-1]
    return F.pad(x_BHSG, (0, missing)) if missing else x_BHSG


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
    """Let the attention of `model` exchange what its queries need of other ranks' positions."""
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
        if isinstance(module, RotaryEmbedding):
            module.length_of = partial(_whole_length, sharding)
        if isinstance(module, Recurrence):
            module.carry = _CarryOverRanks(sharding, group)
        if isinstance(module, Attention):
            if method == "allgather":
                module.exchange = _AllGather(group)
            elif method == "alltoall":
                module.kernel = RingKernel(sharding, group, module.scale)
            else:
                module.kernel = _UlyssesKernel(module.kernel, sharding, group)


def _whole_length(sharding: SequenceSharding, positions_BS: torch.Tensor) -> int:
    return positions_BS.shape[1] * sharding.num_ranks


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
        return attention_mask(own, order, documents_BS, self._inner.backend, self._inner.kind)


class _AllGather:
    """Gathers the states of all positions, in the order of the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, states: States, context: BlockContext) -> States:
        # N: the ranks. Positions are the dim before the last.
        gathered_N = all_gather(_packed(*states), self._group)
        return tuple(
            state.movedim(0, -3).flatten(-3, -2) for state in _unpacked(gathered_N, *states)
        )


class _CarryOverRanks(Carry):
    """Takes over inputs and states from the pieces before, wherever they are."""

    needs_map = True

    def __init__(self, sharding: SequenceSharding, group: dist.ProcessGroup) -> None:
        self._sharding = sharding
        self._group = group
        self.num_pieces = len(sharding.own_pieces)

    def documents(self, documents_BS: torch.Tensor, num_before: int) -> torch.Tensor:
        padded = F.pad(documents_BS, (num_before, 0), value=NO_DOCUMENT)
        length = documents_BS.shape[1] // len(self._sharding.piece_order)
        starts = (piece * length for piece in self._sharding.own_pieces)
        parts = [padded[:, start : start + num_before + length] for start in starts]
        return torch.stack(parts, dim=1).flatten(0, 1)

    def extend(self, inputs_ZLI: torch.Tensor, num_before: int) -> torch.Tensor:
        last = self._of_all_pieces(inputs_ZLI[:, -num_before:])
        before = self._own([torch.zeros_like(last[0]), *last[:-1]])
        return torch.cat([before, inputs_ZLI], dim=1)

    def begin(self, own: AffineMap | None) -> torch.Tensor:
        assert own is not None
        width = own.matrix_ZHEE.shape[-1]
        both = torch.cat([own.matrix_ZHEE, own.offset_ZHEG], dim=-1)
        maps = [
            AffineMap(joined[..., :width], joined[..., width:])
            for joined in self._of_all_pieces(both)
        ]
        states = [torch.zeros_like(maps[0].offset_ZHEG)]
        for affine_map in maps[:-1]:
            states.append(affine_map.of(states[-1]))
        return self._own(states)

    def _of_all_pieces(self, x_Z: torch.Tensor) -> list[torch.Tensor]:
        """Gather a tensor [Z, ...], and return the one [B, ...] of each piece of the sequence."""
        # N: the ranks.
        gathered_NBP = all_gather(x_Z, self._group).unflatten(1, (-1, self.num_pieces))
        held = gathered_NBP.movedim(2, 1).flatten(0, 1)
        return [held[place] for place in self._sharding.piece_order]

    def _own(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return those of this rank's pieces, of tensors [B, ...] of all pieces, as [Z, ...]."""
        # From a stack of all, so that every rank takes part in the exchange of gradients.
        stack_BQ = torch.stack(parts, dim=1)
        own = [stack_BQ[:, piece] for piece in self._sharding.own_pieces]
        return torch.stack(own, dim=1).flatten(0, 1)


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
