"""What the example adds to the trainer: the module of experimental.custom_import."""

from pathlib import Path

import torch

from examples.online_rl.policy_loss import MISMATCH, policy_loss
from examples.online_rl.rollouts import RolloutDataset, read_rollouts
from examples.online_rl.task import SAMPLES_PER_STEP, SEQ_LEN
from torchtitan_lite.api import (
    Event,
    HookContext,
    StepReport,
    TrainState,
    register_hook,
    register_loss,
    register_model,
    register_online_dataset,
)
from torchtitan_lite.core.errors import ConfigError


def report_rollouts(context: HookContext):
    """Return the hook that records reward and mismatch of each step, as the event `rollouts`."""
    training = context.config.training
    if training.global_batch_size != SAMPLES_PER_STEP or training.seq_len != SEQ_LEN:
        raise ConfigError(
            f"The rollouts need training.global_batch_size = {SAMPLES_PER_STEP} and "
            f"training.seq_len = {SEQ_LEN}."
        )
    folder = Path(training.dataset_path or "")

    def hook(state: TrainState, report: StepReport) -> None:
        largest = torch.tensor(MISMATCH.take(), dtype=torch.float64)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        if context.mesh.is_leader:
            version = report.samples[0] // SAMPLES_PER_STEP
            rollouts = read_rollouts(folder, version)
            values = {
                "version": version,
                "reward": rollouts.mean_reward,
                "right": rollouts.fraction_right,
                "mismatch": largest.item(),
            }
            context.metrics.event(Event(name="rollouts", step=report.number, values=values))

    return hook


register_model("arithmetic", "examples.online_rl.model")
register_online_dataset("rollouts", RolloutDataset)
register_loss("policy_gradient", policy_loss)
register_hook(report_rollouts)
