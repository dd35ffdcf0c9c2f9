"""The baseline: the training step that one would write for a single run, with torch alone.

It does to the weights what the trainer's step does, and nothing else: no metrics, no garbage
collection, no data loading, no check for non-finite numbers.

As a program it is the floor of a start: it builds the model, takes one step and writes a line. It
imports torch and the model's modules, and nothing else of the trainer (configuration, data,
metrics, checkpoints), because its imports are timed. Weights and samples come from a file (see
`baseline_loop`), so the loss must equal the trainer's. Started by `benchmarks.step`, alone or by
torchrun:

    python -m benchmarks.baseline INPUTS FIRST_STEP
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan_lite.nn.decoder import Decoder, DecoderLayer
from torchtitan_lite.nn.feed_forward import Dense
from torchtitan_lite.nn.grouped_query import GroupedQuery
from torchtitan_lite.nn.rope import Rope

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of the step."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of one rank in a step."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    positions_BS: torch.Tensor
    documents_BS: torch.Tensor | None
    rng_keys_B: torch.Tensor


def shard(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Apply FSDP2 over all ranks, per block, with torch's default settings."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the number of targets of all ranks: gradients are summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Return fused AdamW without weight decay on norms and embeddings."""
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        is_decayed = "norm" not in name and "embeddings" not in name
        (decayed if is_decayed else undecayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps, fused=True)


def logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Run the forward pass."""
    return model(
        batch.tokens_BS,
        positions_BS=batch.positions_BS,
        rng_keys_B=batch.rng_keys_B,
        documents_BS=batch.documents_BS,
    )


def loss_sum(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropy over the target tokens."""
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    lr: float,
    max_norm: float,
    world_size: int,
) -> float:
    """Take one step and return the mean loss over the target tokens of all ranks."""
    summed_loss = loss_sum(logits(model, batch), batch.targets_BS)
    num_targets = (batch.targets_BS != IGNORE_INDEX).sum()
    if world_size > 1:
        torch.distributed.all_reduce(num_targets)
    loss = summed_loss / num_targets
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    update(optimizer, lr)
    loss = loss.detach()
    if world_size > 1:
        torch.distributed.all_reduce(loss)
    return loss.item()


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Step the optimizer with learning rate `lr`, then drop the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def decoder(dims: dict[str, Any]) -> Decoder:
    """Return a model of these dimensions with undefined weights."""
    head_size = dims["head_dim"] or dims["dim"] // dims["num_heads"]
    attention = GroupedQuery(
        num_heads=dims["num_heads"],
        num_kv_heads=dims["num_kv_heads"],
        head_dim=head_size,
        rotation=Rope(head_dim=head_size, theta=dims["rope_theta"]),
    )
    layer = DecoderLayer(attention=attention, feed_forward=Dense(hidden_dim=dims["hidden_dim"]))
    return Decoder(
        dim=dims["dim"],
        vocab_size=dims["vocab_size"],
        norm_eps=dims["norm_eps"],
        layers=[layer] * dims["num_layers"],
        attention_backend="sdpa",
        tied_embeddings=dims["tied_embeddings"],
        dropout=0.0,
    )


def main(inputs: Path, first_step: Path) -> None:
    """Take one step on `inputs`; rank 0 then writes one JSON line to `first_step`."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    values = torch.load(inputs, weights_only=True)
    recipe = Recipe(**values["recipe"])
    model = decoder(values["dims"])
    model.load_state_dict(values["weights"])
    if world_size > 1:
        shard(model, model.layers.values())
    loss = step(
        model,
        adamw(model, recipe),
        Batch(**values["batches"][rank]),
        lr=values["lr"],
        max_norm=recipe.max_norm,
        world_size=world_size,
    )
    if rank == 0:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        result = {"loss": loss, "dtype": dtype, "threads": torch.get_num_threads()}
        first_step.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
