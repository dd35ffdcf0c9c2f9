"""The loss on held-out documents. Layer: beside trainer."""

import torch

from torchtitan_lite.data import ValidationData
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.spec import IGNORE, Schedule
from torchtitan_lite.train_state import TrainState


def validate(state: TrainState, schedule: Schedule, data: ValidationData, mesh: Mesh) -> float:
    """Mean loss per target token over the validation data, in nats. Every rank must call it."""
    state.model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device.torch_device)
    for microbatches in data.microbatches(mesh.batch_rank, mesh.degrees.batch):
        num_targets = sum(int((mb.targets_BS != IGNORE).sum()) for mb in microbatches)
        totals[0] += schedule.run(microbatches, backward=False)
        totals[1] += num_targets / mesh.degrees.token_copies
    state.model.train()
    loss_sum, num_targets = mesh.sum(totals).tolist()
    return loss_sum / num_targets
