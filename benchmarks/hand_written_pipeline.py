"""The floor of pipeline parallelism: torch's PipelineStage and Schedule1F1B around plain stages.

The last stage gives logits, and plain cross entropy is taken of them; the trainer's loss is fused
with the output projection.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.hand_written_step import IGNORE, Batch, update


class PipelineStep:
    """The step of one rank, which holds one stage."""

    def __init__(self, stage_module: nn.Module, group: dist.ProcessGroup, num_microbatches: int):
        rank, size = group.rank(), group.size()
        self._module = stage_module
        self._group = group
        self._is_first, self._is_last = rank == 0, rank == size - 1
        self._num_targets = torch.ones(())
        stage = PipelineStage(stage_module, rank, size, torch.device("cpu"), group=group)
        self._schedule = Schedule1F1B(
            stage, num_microbatches, loss_fn=self._loss, scale_grads=False
        )

    def step(
        self, optimizer: torch.optim.Optimizer, batch: Batch, *, lr: float, max_norm: float
    ) -> float:
        """One step. Returns the mean loss over the target tokens, on every rank."""
        self._num_targets = (batch.targets_BS != IGNORE).sum()
        inputs: dict[str, Any] = {"positions_BS": batch.positions_BS, "keys_B": batch.keys_B}
        if batch.documents_BS is not None:
            inputs["documents_BS"] = batch.documents_BS
        losses: list[torch.Tensor] = []
        self._schedule.step(
            *((batch.tokens_BS,) if self._is_first else ()),
            target=batch.targets_BS if self._is_last else None,
            losses=losses if self._is_last else None,
            return_outputs=False,
            **inputs,
        )
        parameters = list(self._module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        square = nn.utils.get_total_norm(gradients).square()
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        # Each stage knows its own part of the norm, and the last one the loss.
        totals = torch.stack([square, loss])
        dist.all_reduce(totals, group=self._group)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, totals[0].sqrt())
        update(optimizer, lr)
        return totals[1].item()

    def _loss(self, logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        loss_sum = F.cross_entropy(
            logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return loss_sum / self._num_targets
