"""The baseline of tensor and pipeline parallelism: torch's own styles, stages and schedules.

The loss is plain cross entropy over logits. The trainer's loss is fused with the output projection
and reduces over ranks itself.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.baseline import IGNORE_INDEX, Batch, logits, loss_sum, update
from torchtitan_lite.nn.decoder import Decoder


def apply_tensor_parallel(model: Decoder, tp: DeviceMesh) -> None:
    """Shard the matrices of a Llama over the ranks of `tp`, with sequence parallelism."""
    vocab_size, dim = model.output.weight.shape
    # Torch's styles support linears. ColwiseParallel passes on the first input alone, so a plain
    # linear suffices for the decoder's call with targets and a loss.
    model.output = nn.Linear(dim, vocab_size, bias=False)  # pyright: ignore[reportAttributeAccessIssue]
    whole, sequence = Replicate(), Shard(1)
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False
        ),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(sequence, None), desired_input_layouts=(whole, None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=sequence),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(
            input_layouts=(sequence,), desired_input_layouts=(whole,)
        ),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=sequence),
    }
    parallelize_module(model, tp, plan)


def tensor_parallel_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    lr: float,
    max_norm: float,
) -> float:
    """Take one step on ranks with equal samples and return the mean loss over the target tokens."""
    logits_BSV = logits(model, batch)
    num_targets = (batch.targets_BS != IGNORE_INDEX).sum()
    with loss_parallel():
        loss = loss_sum(logits_BSV, batch.targets_BS) / num_targets
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    update(optimizer, lr)
    return loss.item()


class PipelineStep:
    """The step of a rank that holds one stage, with the 1F1B schedule."""

    def __init__(self, stage_module: nn.Module, group: dist.ProcessGroup, num_microbatches: int):
        rank, size = group.rank(), group.size()
        self._module = stage_module
        self._group = group
        self._is_first, self._is_last = rank == 0, rank == size - 1
        self._num_targets = torch.ones(())
        stage = PipelineStage(stage_module, rank, size, torch.device("cpu"), group=group)
        self._pipeline_schedule = Schedule1F1B(
            stage, num_microbatches, loss_fn=self._loss, scale_grads=False
        )

    def step(
        self, optimizer: torch.optim.Optimizer, batch: Batch, *, lr: float, max_norm: float
    ) -> float:
        """Take one step and return the mean loss over the target tokens, on every rank."""
        self._num_targets = (batch.targets_BS != IGNORE_INDEX).sum()
        inputs: dict[str, Any] = {
            "positions_BS": batch.positions_BS,
            "rng_keys_B": batch.rng_keys_B,
        }
        if batch.documents_BS is not None:
            inputs["documents_BS"] = batch.documents_BS
        losses: list[torch.Tensor] = []
        self._pipeline_schedule.step(
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
        # Each stage has its own part of the norm, and the last stage has the loss.
        totals = torch.stack([square, loss])
        dist.all_reduce(totals, group=self._group)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, totals[0].sqrt())
        update(optimizer, lr)
        return totals[1].item()

    def _loss(self, logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        return loss_sum(logits_BSV, targets_BS) / self._num_targets
