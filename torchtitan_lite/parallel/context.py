"""Context parallelism: the ranks of the `cp` axis share each sequence.

All but attention works position by position. For attention, keys and values travel:

- allgather: every rank gathers all keys and values, and masks those that it may not see;
- alltoall: they go round in a ring, and partial results are merged by their log-sum-exp (ring
  attention, arXiv:2310.01889), so that no rank ever holds them all;
- ulysses: heads are exchanged for positions, so that each rank sees whole sequences of some heads
  (arXiv:2309.14509).

Layer: above nn and mesh.
"""

from typing import Any

import torch
from torch import nn

from torchtitan_lite.mesh import Mesh
from torchtitan_lite.nn.attention import Attention, AttentionMask, visible
from torchtitan_lite.parallel.collectives import all_gather, all_to_all
from torchtitan_lite.parallel.ring import RingKernel
from torchtitan_lite.parallel.sequence_cut import SequenceCut
from torchtitan_lite.schema.parallelism import ParallelismConfig


def sequence_cut(mesh: Mesh, parallelism: ParallelismConfig) -> SequenceCut:
    """How this mesh cuts sequences."""
    return SequenceCut(
        num_ranks=mesh.degrees.cp,
        rank=mesh.device_mesh.get_local_rank("cp"),
        head_tail=parallelism.context_parallel_load_balancer == "headtail",
    )


def apply(model: nn.Module, mesh: Mesh, parallelism: ParallelismConfig) -> None:
    """Put kernels that exchange keys and values in the place of the model's own."""
    if mesh.degrees.cp == 1:
        return
    cut = sequence_cut(mesh, parallelism)
    group = mesh.device_mesh.get_group("cp")
    method = parallelism.context_parallel_rotate_method
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, AttentionMask):
                mask = _CutMask(child, cut, whole=method == "ulysses")
                setattr(module, name, _NoMask() if method == "alltoall" else mask)
        if isinstance(module, Attention):
            inner = module.kernel
            if method == "allgather":
                module.kernel = _AllGatherKernel(inner, group)
            elif method == "alltoall":
                module.kernel = RingKernel(cut, group)
            else:
                module.kernel = _UlyssesKernel(inner, cut, group)


class _NoMask(nn.Module):
    """Ring attention needs none."""

    def forward(self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None) -> None:
        return None


class _CutMask(nn.Module):
    """The mask of this rank's positions against those of all ranks, in the ranks' order; or, with
    `whole`, that of whole sequences."""

    def __init__(self, inner: AttentionMask, cut: SequenceCut, *, whole: bool) -> None:
        super().__init__()
        self._inner = inner
        self._cut = cut
        self._whole = whole

    def forward(self, positions_BS: torch.Tensor, documents_BS: torch.Tensor | None) -> Any:
        device = positions_BS.device
        length = positions_BS.shape[1] * self._cut.num_ranks
        if self._whole:
            everywhere = torch.arange(length, device=device).expand(len(positions_BS), -1)
            return self._inner(everywhere, documents_BS)
        order = self._cut.order(length, device)
        own = self._cut.own(length, device)
        return visible(own, order, documents_BS, self._inner.backend)


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
    """Attention of whole sequences over some of the heads."""

    def __init__(
        self, inner: nn.Module, cut: SequenceCut, group: torch.distributed.ProcessGroup
    ) -> None:
        super().__init__()
        self._inner = inner
        self._cut = cut
        self._group = group

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        num_ranks, num_kv_heads = self._cut.num_ranks, k_BKSE.shape[1]
        if num_kv_heads % num_ranks:
            # Fewer key/value heads than ranks: each rank gets a copy of the one that it needs.
            copies = q_BHSE.shape[1] // num_kv_heads
            k_BKSE = k_BKSE.repeat_interleave(copies, dim=1)
            v_BKSE = v_BKSE.repeat_interleave(copies, dim=1)
        length = q_BHSE.shape[2] * num_ranks
        order = self._cut.order(length, q_BHSE.device)
        q, k, v = (self._to_heads(x, order.argsort()) for x in (q_BHSE, k_BKSE, v_BKSE))
        out_BHSE = self._inner(q, k, v, mask)
        return self._to_positions(out_BHSE, order)

    def _to_heads(self, x_BHSE: torch.Tensor, natural_S: torch.Tensor) -> torch.Tensor:
        """All heads of own positions -> own heads of all positions, in their natural order."""
        rows = x_BHSE.unflatten(1, (self._cut.num_ranks, -1)).movedim(1, 0)
        received_NBHSE = all_to_all(rows, self._group)
        return received_NBHSE.movedim(0, 2).flatten(2, 3)[:, :, natural_S]

    def _to_positions(self, x_BHSE: torch.Tensor, order_S: torch.Tensor) -> torch.Tensor:
        """Own heads of all positions -> all heads of own positions."""
        rows = x_BHSE[:, :, order_S].unflatten(2, (self._cut.num_ranks, -1)).movedim(2, 0)
        received_NBHSE = all_to_all(rows, self._group)
        return received_NBHSE.movedim(0, 1).flatten(1, 2)
