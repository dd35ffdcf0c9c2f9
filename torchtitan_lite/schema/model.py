"""The [model] table."""

from typing import Annotated, Any, Literal

from torchtitan_lite.schema.section import Section, at_least, below


class ModelConfig(Section):
    """Which model to train."""

    name: str = "llama3"
    """Model family: the name of a file in `models/`, or one that `experimental.custom_import`
    registers."""
    flavor: str = "debugmodel"
    """Size of the model within its family. "hf": the model, family included, that `config.json` in
    `hf_assets_path` describes."""
    dims: dict[str, Any] = {}
    """The sizes of a model that is no flavor, by name. With flavor "hf" they are read from
    `config.json` and need not be given; a checkpoint's manifest names them."""
    hf_assets_path: str | None = None
    """Folder with the tokenizer in Hugging Face's format (tokenizer.json). Unset: a byte-level BPE
    of the model's vocabulary size is trained once on the corpus and cached."""
    attention_backend: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention kernel: "sdpa" runs anywhere, "flex" (FlexAttention) needs a GPU. "auto": what
    the flavor asks for."""
    attention_mask: Literal["auto", "causal", "document"] = "auto"
    """"causal": a token sees all earlier tokens of its block; "document": only those of its own
    document, and the first token of a document is no target. "auto": what the flavor asks for."""
    dropout: Annotated[float, at_least(0), below(1)] = 0.0
    """Share of the residual updates that is dropped in training, by a mask that depends on the
    seed, the step and the position only."""
    router_bias_update_rate: Annotated[float, at_least(0)] | None = None
    """How far each step moves the bias by which a mixture of experts evens out the load of its
    experts. Unset: what the flavor asks for."""
    converters: list[Literal["quantize.linear.float8"]] = []
    """Changes of the model's modules before training: "quantize.linear.float8" computes linear
    layers in float8, as [quantize.linear.float8] says."""
    print_after_conversion: bool = False
    """Print the model's modules once they are built."""
