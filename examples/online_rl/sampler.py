"""The sampler: a job of its own, which receives each version of the weights and writes its
rollouts. `python -m examples.online_rl.sampler RUN ROLLOUTS`"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

from examples.online_rl.model import model_spec
from examples.online_rl.policy_loss import log_probs_of
from examples.online_rl.rollouts import Rollouts, rollouts_file, write_rollouts
from examples.online_rl.task import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    SAMPLES_PER_PROMPT,
    SAMPLES_PER_STEP,
    SEQ_LEN,
    answer_of,
    encode,
    reward,
)
from torchtitan_lite.checkpoint import model_tensors
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.core.log import configure_logging, logger
from torchtitan_lite.core.rng import generator
from torchtitan_lite.nn.initialize import allocate_memory, on_meta
from torchtitan_lite.nn.spec import IGNORE_INDEX, VocabularyShard
from torchtitan_lite.serving.publish import Subscriber, Target

_SEED = 1
_POLL_S = 1.0


def main() -> None:
    """Sample from each version until this process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="output folder of the trainer")
    parser.add_argument("rollouts", type=Path, help="folder of the rollouts")
    options = parser.parse_args()
    configure_logging()
    with Subscriber(options.run, timeout_s=300) as subscriber:
        model = _model_of(subscriber)
        tensors = {name.removeprefix("model."): one for name, one in model_tensors(model).items()}
        subscription = subscriber.subscribe(Target(name, one) for name, one in tensors.items())
        while True:
            update = subscription.update(timeout_s=_POLL_S)
            if update is None or rollouts_file(options.rollouts, update.version).exists():
                continue
            started = time.perf_counter()
            rollouts = sample(model, update.version)
            write_rollouts(options.rollouts, rollouts)
            logger.info(
                "version %d: reward %.3f, sampled in %.3f s",
                update.version,
                rollouts.mean_reward,
                time.perf_counter() - started,
            )


def _model_of(subscriber: Subscriber) -> nn.Module:
    """Build the model, with uninitialized weights in the published dtype."""
    spec = model_spec(ModelConfig(flavor=subscriber.config["model"]["flavor"]))
    dtype = next(iter(subscriber.tensors.values())).dtype
    model = on_meta(spec.build, dtype)
    allocate_memory(model, torch.device("cpu"))
    return model.requires_grad_(False).eval()


@torch.no_grad()
def sample(model: nn.Module, version: int) -> Rollouts:
    """Return the rollouts of a version: a function of the weights, the seed and the version."""
    prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES_PER_PROMPT)]
    tokens_BL = torch.zeros(len(prompts), PROMPT_TOKENS + ANSWER_TOKENS, dtype=torch.int64)
    tokens_BL[:, :PROMPT_TOKENS] = torch.tensor([encode(prompt) for prompt in prompts])
    uniform_BA = torch.rand(
        len(prompts),
        ANSWER_TOKENS,
        dtype=torch.float64,
        generator=generator(_SEED, "rollouts", version),
    )
    for number in range(ANSWER_TOKENS):
        length = PROMPT_TOKENS + number
        logits_BV = model(tokens_BL[:, :length], **_inputs(length))[:, -1]
        below_BV = logits_BV.double().softmax(-1).cumsum(-1) <= uniform_BA[:, number, None]
        tokens_BL[:, length] = below_BV.sum(-1).clamp_max(logits_BV.shape[1] - 1)
    answers = [answer_of(row) for row in tokens_BL[:, PROMPT_TOKENS:].tolist()]
    rewards = [reward(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    rows = [encode(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return Rollouts(
        version=version,
        tokens=rows,
        are_targets=[[place >= PROMPT_TOKENS for place in range(len(row))] for row in rows],
        log_probs=_log_probs(model, rows),
        rewards=rewards,
        advantages=_advantages(rewards),
    )


def _log_probs(model: nn.Module, rows: list[list[int]]) -> list[list[float]]:
    """Return the log probability of each token of the answers; 0 for the prompts.

    One forward pass, of the shape of the trainer's: a matrix product of another shape may add up in
    another order, and differ in the last bit.
    """
    tokens_BL = torch.zeros(SAMPLES_PER_STEP, SEQ_LEN + 1, dtype=torch.int64)
    targets_BS = torch.full((SAMPLES_PER_STEP, SEQ_LEN), IGNORE_INDEX)
    for number, row in enumerate(rows):
        tokens_BL[number, : len(row)] = torch.tensor(row)
        targets_BS[number, PROMPT_TOKENS - 1 : len(row) - 1] = torch.tensor(row[PROMPT_TOKENS:])

    def picked(
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        *,
        shard: VocabularyShard | None = None,
    ) -> torch.Tensor:
        return log_probs_of(hidden_TD, weight_VD, targets_T)[1]

    # The place of the trainer's loss.
    found_T = model(tokens_BL[:, :SEQ_LEN], **_inputs(SEQ_LEN), targets_BS=targets_BS, loss=picked)
    found_BS = found_T.unflatten(0, targets_BS.shape).tolist()
    return [[0.0, *found[: len(row) - 1]] for found, row in zip(found_BS, rows, strict=True)]


def _inputs(length: int) -> dict[str, torch.Tensor]:
    """Return positions and keys of a forward pass; the model has no dropout, which uses keys."""
    return {
        "positions_BS": torch.arange(length).expand(SAMPLES_PER_STEP, length),
        "rng_keys_B": torch.zeros(SAMPLES_PER_STEP, dtype=torch.int64),
    }


def _advantages(rewards: list[float]) -> list[float]:
    """Return the advantage of each rollout over those of the same prompt, in their standard
    deviations (GRPO, arXiv:2402.03300); 0 where all have the same reward."""
    grouped_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, SAMPLES_PER_PROMPT)
    centered_PG = grouped_PG - grouped_PG.mean(1, keepdim=True)
    return (centered_PG / (grouped_PG.std(1, keepdim=True) + 1e-6)).flatten().tolist()


if __name__ == "__main__":
    main()
