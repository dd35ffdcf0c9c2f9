"""The model: a small Llama 3 with initial weights for its size. A module of `register_model`."""

from dataclasses import replace

from examples.online_rl.task import VOCABULARY
from torchtitan_lite.config.tables.model import ModelConfig
from torchtitan_lite.models.llama3 import Llama3Dims, spec_of
from torchtitan_lite.nn.spec import InitRule, ModelSpec

FLAVORS = {
    "tiny": Llama3Dims(
        dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        hidden_dim=128,
        vocab_size=len(VOCABULARY),
        max_seq_len=64,
    )
}
_INIT = (
    InitRule(pattern="*norm*", kind="ones"),
    # About 1 / sqrt(dim). The usual 0.02 is for large models: here it would make layers that hardly
    # add to the embeddings, and policies that see little of their prompt for hundreds of steps.
    InitRule(pattern="layers.*", kind="normal", std=0.12),
    InitRule(pattern="*", kind="normal", std=0.02),
)


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec of `config.flavor`."""
    return replace(spec_of(FLAVORS[config.flavor], config.flavor), init=_INIT)
