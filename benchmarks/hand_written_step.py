"""The floor: the training step that a person would write for one run, with torch alone.

It does what the trainer's step does to the weights, and nothing else: no metrics, no garbage
collection, no data loading, no check for numbers that are not finite. Imports are few, since
`bare_start` times them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The numbers of a run that the step needs."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's share of a step."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    positions_BS: torch.Tensor
    documents_BS: torch.Tensor | None
    keys_B: torch.Tensor


def shard(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """FSDP2 over all ranks, block by block, with the settings that torch has by default."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the number of targets of all ranks, so gradients are summed.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Fused AdamW without decay on norms and embeddings."""
    decayed, undecayed = [], []
    for name, parameter in model.named_parameters():
        plain = "norm" not in name and "embeddings" not in name
        (decayed if plain else undecayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps, fused=True)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    lr: float,
    max_norm: float,
    world_size: int,
) -> float:
    """One step. Returns the mean loss over the target tokens of all ranks."""
    logits_BSV = model(
        batch.tokens_BS,
        positions_BS=batch.positions_BS,
        keys_B=batch.keys_B,
        documents_BS=batch.documents_BS,
    )
    loss_sum = F.cross_entropy(
        logits_BSV.flatten(0, 1), batch.targets_BS.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    num_targets = (batch.targets_BS != IGNORE).sum()
    if world_size > 1:
        torch.distributed.all_reduce(num_targets)
    loss = loss_sum / num_targets
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    update(optimizer, lr)
    loss = loss.detach()
    if world_size > 1:
        torch.distributed.all_reduce(loss)
    return loss.item()


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The optimizer's step with learning rate `lr`; gradients are gone afterwards."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
