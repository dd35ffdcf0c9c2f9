"""Inference: loading weights, text generation with a KV cache, and the tensors of saved states."""

from torchtitan_lite.serving.inference.generation import (
    BatchGenerator,
    Generated,
    Prompt,
    TextStream,
    check_prompts,
    prompt_ids,
)
from torchtitan_lite.serving.inference.loaded_model import (
    LoadedModel,
    ModelFiles,
    load_model,
    load_weights,
    open_model,
)
from torchtitan_lite.serving.inference.sampling import Sampling
from torchtitan_lite.serving.inference.saved_tensors import SavedTensor, saved_tensors
from torchtitan_lite.serving.inference.texts import GeneratedText, encode_prompts, generate
from torchtitan_lite.serving.inference.weights import (
    Weights,
    open_weights,
    serve,
    stop_ids,
    tokenizer_of,
)

__all__ = [
    "BatchGenerator",
    "Generated",
    "GeneratedText",
    "LoadedModel",
    "ModelFiles",
    "Prompt",
    "Sampling",
    "SavedTensor",
    "TextStream",
    "Weights",
    "check_prompts",
    "encode_prompts",
    "generate",
    "load_model",
    "load_weights",
    "open_model",
    "open_weights",
    "prompt_ids",
    "saved_tensors",
    "serve",
    "stop_ids",
    "tokenizer_of",
]
