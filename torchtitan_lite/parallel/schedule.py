"""The schedule of a step: in which order this rank runs its microbatches through its stages.

Layer: above mesh and spec.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_lite.mesh import Mesh, ParallelismConfig
from torchtitan_lite.parallel.collectives import all_gather
from torchtitan_lite.parallel.context import sequence_cut
from torchtitan_lite.parallel.fsdp import reshard
from torchtitan_lite.parallel.sequence_cut import SequenceCut
from torchtitan_lite.spec import Microbatch, Schedule, TokenLoss


def build_schedule(
    model: nn.Module, loss: TokenLoss, mesh: Mesh, parallelism: ParallelismConfig
) -> Schedule:
    """The schedule for the model on this rank."""
    return OneStage(model, loss, mesh, sequence_cut(mesh, parallelism))


class OneStage:
    """The whole model on this rank: microbatches one after the other, gradients accumulated.

    Each microbatch's gradients are reduced over the shards at once, since whole gradients would
    need the memory that sharding saves; replicas are summed once, after the last.
    """

    def __init__(self, model: nn.Module, loss: TokenLoss, mesh: Mesh, cut: SequenceCut) -> None:
        self._cut = cut
        self._group = mesh.device_mesh.get_group("cp")
        self._model = model
        self._loss = loss
        self._device = mesh.device.torch_device
        # The ranks that share the matrices all compute the same loss.
        self._copies = mesh.degrees.tp

    def run(self, microbatches: Sequence[Microbatch], *, backward: bool) -> torch.Tensor:
        """See `spec.Schedule`."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, microbatch in enumerate(microbatches, start=1):
            batch = self._cut.cut(microbatch.to(self._device))
            if backward and isinstance(self._model, FSDPModule):
                is_last = number == len(microbatches)
                self._model.set_is_last_backward(is_last)
                self._model.set_requires_all_reduce(is_last)
            with torch.set_grad_enabled(backward):
                loss = self._model(
                    batch.tokens_BS,
                    positions_BS=batch.positions_BS,
                    keys_B=batch.keys_B,
                    documents_BS=batch.documents_BS,
                    targets_BS=batch.targets_BS,
                    loss=self._loss,
                )
            if backward:
                loss.backward()
            total += loss.detach()
        if not backward:
            reshard(self._model)
        return total / self._copies

    @torch.no_grad()
    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """See `spec.Schedule`."""
        tokens_BS = tokens_BS.to(self._device)
        batch = self._cut.cut(
            Microbatch(
                tokens_BS=tokens_BS,
                targets_BS=tokens_BS,
                positions_BS=torch.arange(tokens_BS.shape[1], device=self._device).expand_as(
                    tokens_BS
                ),
                documents_BS=None,
                keys_B=torch.zeros_like(tokens_BS[:, 0]),
                samples=(),
            )
        )
        own_BSV = self._model(batch.tokens_BS, positions_BS=batch.positions_BS, keys_B=batch.keys_B)
        reshard(self._model)
        if self._cut.num_ranks == 1:
            return own_BSV
        order = self._cut.order(tokens_BS.shape[1], self._device)
        return all_gather(own_BSV, self._group).movedim(0, 1).flatten(1, 2)[:, order.argsort()]
