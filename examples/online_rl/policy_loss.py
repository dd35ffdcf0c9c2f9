"""The loss: policy gradient with a clipped importance ratio, as in PPO and GRPO, and an entropy
bonus."""

from dataclasses import dataclass

import torch

from torchtitan_lite.api import Config, Microbatch, TokenLoss
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.nn.spec import IGNORE_INDEX, VocabularyShard

CLIP = 0.2
"""Bound of |ratio - 1| beyond which a sample has no gradient."""
ENTROPY_WEIGHT = 0.1
"""Without a bonus the policy becomes certain of wrong answers before it has ever seen a reward for
the right ones."""


@dataclass
class Mismatch:
    """Mismatch of the log probabilities of trainer and sampler in the current step."""

    largest: float = 0.0

    def take(self) -> float:
        """Return the largest one since the last call, in nats."""
        found, self.largest = self.largest, 0.0
        return found


MISMATCH = Mismatch()
"""Of this process: the loss writes it, the hook reads it."""


def log_probs_of(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probabilities of all tokens, [T, V], and of the targets, [T], which are 0
    without a target. Trainer and sampler both call it, with tensors of the same shape."""
    log_probs_TV = (hidden_TD @ weight_VD.T).log_softmax(-1)
    picked_T = log_probs_TV.gather(1, targets_T[:, None].clamp_min(0))[:, 0]
    return log_probs_TV, picked_T.masked_fill(targets_T == IGNORE_INDEX, 0.0)


def policy_loss(config: Config):
    """Return the loss of a microbatch, a `MicrobatchLoss`. Its gradient is divided by the number of
    target tokens in the step, as that of any loss."""

    def loss_of(batch: Microbatch) -> TokenLoss:
        sampled_T = batch.target_values["log_probs"].flatten()
        advantages_T = batch.target_values["advantages"].flatten()

        def loss(
            hidden_TD: torch.Tensor,
            weight_VD: torch.Tensor,
            targets_T: torch.Tensor,
            *,
            shard: VocabularyShard | None = None,
        ) -> torch.Tensor:
            if shard is not None:
                raise ConfigError(
                    "This loss needs the whole vocabulary on each rank: set "
                    "parallelism.disable_loss_parallel = true."
                )
            log_probs_TV, trained_T = log_probs_of(hidden_TD, weight_VD, targets_T)
            difference_T = trained_T - sampled_T
            MISMATCH.largest = max(MISMATCH.largest, difference_T.detach().abs().max().item())
            ratio_T = difference_T.exp()
            objective_T = torch.minimum(
                ratio_T * advantages_T, ratio_T.clamp(1 - CLIP, 1 + CLIP) * advantages_T
            )
            entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
            objective_T = objective_T + ENTROPY_WEIGHT * entropy_T
            return -objective_T.masked_fill(targets_T == IGNORE_INDEX, 0.0).sum()

        return loss

    return loss_of
