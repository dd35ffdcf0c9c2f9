"""The floor of tensor parallelism: the plan that a person would write for a Llama, and its step.

Torch's styles throughout: matrices by columns and rows, the sequence cut between them, and the
loss by `loss_parallel` over logits that lie cut over the vocabulary. The trainer's loss is fused
with the output projection and sums over ranks by itself; here it is plain cross entropy.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
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

from benchmarks.hand_written_step import IGNORE, Batch, update
from torchtitan_lite.nn.decoder import Decoder


def cut(model: Decoder, tp: DeviceMesh) -> None:
    """Cut the matrices of `model` over the ranks of `tp`."""
    vocab_size, dim = model.output.weight.shape
    # Torch's styles know linears. ColwiseParallel hands on the first input alone, so that a plain
    # linear does for the decoder's call with targets and a loss.
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


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    lr: float,
    max_norm: float,
) -> float:
    """One step of ranks that all have the same samples. Returns the mean loss over the target
    tokens."""
    logits_BSV = model(
        batch.tokens_BS,
        positions_BS=batch.positions_BS,
        keys_B=batch.keys_B,
        documents_BS=batch.documents_BS,
    )
    num_targets = (batch.targets_BS != IGNORE).sum()
    with loss_parallel():
        loss_sum = F.cross_entropy(
            logits_BSV.flatten(0, 1),
            batch.targets_BS.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
        )
        loss = loss_sum / num_targets
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    update(optimizer, lr)
    return loss.item()
