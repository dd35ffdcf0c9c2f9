"""Inference: loading weights, and text generation with a KV cache.

Layer: above config, checkpoint, models and parallel; beside trainer.
"""

from torchtitan_lite.inference.generation import (
    BatchGenerator,
    Generated,
    Prompt,
    TextStream,
    check_prompts,
    prompt_ids,
)
from torchtitan_lite.inference.sampling import Sampling
from torchtitan_lite.inference.weights import Weights, open_weights, serve, stop_ids, tokenizer_of

__all__ = [
    "BatchGenerator",
    "Generated",
    "Prompt",
    "Sampling",
    "TextStream",
    "Weights",
    "check_prompts",
    "open_weights",
    "prompt_ids",
    "serve",
    "stop_ids",
    "tokenizer_of",
]
