"""Text from the model as it stands, for a look at what it has learned. Layer: beside trainer."""

from collections.abc import Sequence

import torch
from torch import nn

from torchtitan_lite.data import Tokenizer
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.rng import generator
from torchtitan_lite.spec import Schedule


def generate(
    model: nn.Module,
    schedule: Schedule,
    prompt: Sequence[int],
    mesh: Mesh,
    *,
    num_tokens: int,
    max_seq_len: int,
    temperature: float,
    seed: int,
    stop_id: int | None = None,
) -> list[int]:
    """The ids that follow `prompt`, drawn one after the other. Every rank must call it, since the
    weights are sharded; all get the leader's draws.

    The model sees the last `max_seq_len` ids. A `temperature` of 0 takes the likeliest.
    """
    draws = generator(seed, "generate")
    ids = list(prompt)
    was_training = model.training
    model.eval()
    for _ in range(num_tokens):
        seen = ids[-max_seq_len:]
        # Filled up to what the mesh can cut; attention does not look ahead.
        filler = [0] * (-len(seen) % mesh.degrees.sequence_multiple)
        logits_BSV = schedule.logits(torch.tensor([seen + filler]))
        logits_V = logits_BSV[0, len(seen) - 1].float().cpu()
        next_id = mesh.leader_says(_draw(logits_V, temperature, draws))
        if next_id == stop_id:
            break
        ids.append(next_id)
    model.train(was_training)
    return ids[len(prompt) :]


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """What `generate` begins with: the start of a document, as far as the tokenizer has one, and
    `text`."""
    (ids,) = tokenizer.encode_batch([text])
    start = tokenizer.bos_id
    if start is None and not ids:
        start = tokenizer.eos_id or 0
    return ids if start is None else [start, *ids]


def _draw(logits_V: torch.Tensor, temperature: float, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=draws))
