"""Tiny models of transformers with random weights, in folders written by its `save_pretrained`.

Their sizes cover edge cases: grouped heads, a head width other than dim / heads, a vocabulary size
that no number of ranks divides, RoPE scaling from a context that is shorter than the samples.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.job import FIXTURE
from torchtitan_lite.checkpoint.loading import open_snapshot
from torchtitan_lite.checkpoint.snapshots import Snapshot, read_tensor
from torchtitan_lite.checkpoint.storage.base import open_parent_storage
from torchtitan_lite.models import hugging_face_model, model_spec, read_hugging_face_config
from torchtitan_lite.spec import ModelSpec

VOCAB_SIZE = 517
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_SCALED_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 20000.0}


def _llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_COMMON, intermediate_size=80, **more))


def _qwen3_moe(**more: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
    }
    config = Qwen3MoeConfig(**_COMMON, **sizes, rope_parameters=_DEFAULT_ROPE, **more)
    return Qwen3MoeForCausalLM(config)


def _mixtral() -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
    }
    return MixtralForCausalLM(MixtralConfig(**_COMMON, **sizes, rope_parameters=_DEFAULT_ROPE))


_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: _llama(rope_parameters=_DEFAULT_ROPE, rms_norm_eps=3e-5),
    "llama_tied_stretched": lambda: _llama(rope_parameters=_SCALED_ROPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**_COMMON, intermediate_size=80, rope_parameters=_DEFAULT_ROPE)
    ),
    "qwen3_tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **_COMMON, intermediate_size=80, rope_parameters=_DEFAULT_ROPE, tie_word_embeddings=True
        )
    ),
    "qwen3_moe": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3_moe_raw_weights": lambda: _qwen3_moe(norm_topk_prob=False),
    "mixtral": _mixtral,
}
FAMILIES = tuple(_FAMILIES)


def make_model(family: str) -> PreTrainedModel:
    """Return the same model in each call, in float32, with norm weights other than 1."""
    torch.manual_seed(5)
    model = _FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def make_folder(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "60KB"
) -> Path:
    """Save a model with its weights in several shards, and return its folder."""
    model = make_model(family)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def save_config(folder: Path, family: str) -> Path:
    """Save only the config.json, and return its folder."""
    model = make_model(family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> Path:
    """Add a tokenizer trained on the text fixture, with fewer ids than the model, to a folder."""
    raw = ByteLevelBPETokenizer()
    raw.train([str(FIXTURE)], vocab_size=500, special_tokens=["<s>", "</s>"], show_progress=False)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=raw._tokenizer, bos_token="<s>", eos_token="</s>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return folder


def our_model(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load the model of a folder in one process, without a mesh."""
    spec = model_spec(hugging_face_model(read_hugging_face_config(folder), str(folder)))
    snapshot = open_snapshot(*open_parent_storage(str(folder)), spec)
    model = filled(spec, snapshot)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def filled(spec: ModelSpec, snapshot: Snapshot) -> nn.Module:
    """Return the model of a spec with the weights of a snapshot."""
    model = spec.build()
    tensors = {
        name.removeprefix("model."): read_tensor(snapshot, name)
        for name in snapshot.tensors
        if name.startswith("model.")
    }
    model.load_state_dict(tensors, strict=spec.tied_units is None)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the files of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def tokens() -> torch.Tensor:
    """Return two samples of 41 positions."""
    return torch.randint(0, VOCAB_SIZE, (2, 41), generator=torch.Generator().manual_seed(1))
