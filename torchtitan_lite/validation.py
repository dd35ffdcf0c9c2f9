"""The loss on held-out documents. Layer: beside trainer."""

import math
from dataclasses import replace
from itertools import islice

import torch

from torchtitan_lite.data import ValidationData
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.spec import IGNORE, Schedule
from torchtitan_lite.train_state import TrainState


def validate(state: TrainState, schedule: Schedule, data: ValidationData, mesh: Mesh) -> float:
    """Mean loss per target token over the validation data, in nats; nan where no sample has a
    target. Every rank must call it."""
    state.model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device.torch_device)
    rounds = data.microbatches(mesh.batch_rank, mesh.degrees.batch)
    microbatches = (microbatch for one_round in rounds for microbatch in one_round)
    while at_once := list(islice(microbatches, schedule.min_microbatches)):
        # A pipeline cannot run fewer microbatches than stages: the rest have no targets.
        filler = replace(at_once[0], targets_BS=torch.full_like(at_once[0].targets_BS, IGNORE))
        at_once += [filler] * (schedule.min_microbatches - len(at_once))
        totals[0] += schedule.run(at_once, backward=False)
        totals[1] += sum(int((mb.targets_BS != IGNORE).sum()) for mb in at_once)
    state.model.train()
    loss_sum, num_targets = mesh.sum(totals).tolist()
    return loss_sum / (num_targets / mesh.degrees.token_copies) if num_targets else math.nan
