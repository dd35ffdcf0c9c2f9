"""The loss on held-out documents."""

import math
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import nn

from torchtitan_lite.data import ValidationData
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.nn.spec import IGNORE_INDEX, PipelineSchedule


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """The result of a validation."""

    mean: float
    """Per target token, in nats; NaN without target tokens."""
    num_targets: int
    """Over all ranks."""


def validate(
    model: nn.Module, schedule: PipelineSchedule, data: ValidationData, mesh: Mesh
) -> HeldOutLoss:
    """Measure the loss on the validation data of the `model` that `schedule` runs, which is left
    in training mode. Every rank must call it."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device.torch_device)
    rounds = data.microbatches(mesh.batch_rank, mesh.degrees.batch)
    microbatches = (microbatch for one_round in rounds for microbatch in one_round)
    while at_once := list(islice(microbatches, schedule.min_microbatches)):
        # A pipeline cannot run fewer microbatches than stages: add some without targets.
        filler = replace(
            at_once[0], targets_BS=torch.full_like(at_once[0].targets_BS, IGNORE_INDEX)
        )
        at_once += [filler] * (schedule.min_microbatches - len(at_once))
        totals[0] += schedule.run(at_once, backward=False)
        totals[1] += sum(int((mb.targets_BS != IGNORE_INDEX).sum()) for mb in at_once)
    model.train()
    loss_sum, num_targets = mesh.all_reduce_(totals).tolist()
    num_targets /= mesh.degrees.token_copies
    mean = loss_sum / num_targets if num_targets else math.nan
    return HeldOutLoss(mean=mean, num_targets=round(num_targets))
