"""The floor of a start: a script that imports torch, makes the model, takes one step and says so.

It imports the model's modules and torch, and none of what the trainer brings along (configuration,
data, metrics, checkpoints). Weights and samples come from a file of `bare_inputs`, so that the
loss must be the trainer's. Started by `benchmarks.start`, on its own or by torchrun.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.hand_written_step import Batch, Recipe, adamw, shard, step
from torchtitan_lite.nn.attention import Attention
from torchtitan_lite.nn.decoder import Decoder, DecoderBlock
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.nn.rope import RotaryEmbedding


def main(inputs: Path, first_step: Path) -> None:
    """Take one step on `inputs`; the leader then writes one JSON line to `first_step`."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    given = torch.load(inputs, weights_only=True)
    recipe = Recipe(**given["recipe"])
    model = decoder(given["dims"])
    model.load_state_dict(given["weights"])
    if world_size > 1:
        shard(model, model.layers.values())
    loss = step(
        model,
        adamw(model, recipe),
        Batch(**given["batches"][rank]),
        lr=given["lr"],
        max_norm=recipe.max_norm,
        world_size=world_size,
    )
    if rank == 0:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        said = {"loss": loss, "dtype": dtype, "threads": torch.get_num_threads()}
        first_step.write_text(json.dumps(said) + "\n", encoding="utf-8")
    if world_size > 1:
        torch.distributed.destroy_process_group()


def decoder(dims: dict[str, Any]) -> Decoder:
    """The model of these dimensions, with whatever weights."""
    head_size = dims["head_dim"] or dims["dim"] // dims["num_heads"]
    return Decoder(
        dim=dims["dim"],
        vocab_size=dims["vocab_size"],
        norm_eps=dims["norm_eps"],
        rotary=RotaryEmbedding(head_size, dims["rope_theta"], None),
        blocks=[_block(dims, head_size) for _ in range(dims["num_layers"])],
        attention_backend="sdpa",
        tied_embeddings=dims["tied_embeddings"],
        dropout=0.0,
    )


def _block(dims: dict[str, Any], head_size: int) -> DecoderBlock:
    dim, num_heads, num_kv_heads = dims["dim"], dims["num_heads"], dims["num_kv_heads"]
    return DecoderBlock(
        dim=dim,
        norm_eps=dims["norm_eps"],
        attention=Attention(dim, num_heads, num_kv_heads, head_size, "sdpa"),
        feed_forward=FeedForward(dim, dims["hidden_dim"]),
        dropout=0.0,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
