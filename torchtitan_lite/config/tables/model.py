"""The [model] table."""

from typing import Annotated, Any, Literal

from torchtitan_lite.config.tables.section import Section, at_least, below


class ModelConfig(Section):
    """The model to train."""

    name: str = "llama3"
    """Model family: the name of a file in `models/`, or one that `experimental.custom_import`
    registers. "auto": that of `config.json` in `hf_assets_path`; so it is if the folder has one and
    neither name nor flavor is set."""
    flavor: str = "debugmodel"
    """Size of the model within its family. "hf": the model, family included, of `config.json` in
    `hf_assets_path`."""
    dims: dict[str, Any] = {}
    """Dimensions of a model that is not a flavor, by name. With flavor "hf" they are read from
    `config.json`; a checkpoint's manifest records them."""
    hf_assets_path: str | None = None
    """Folder with the tokenizer in Hugging Face's format (tokenizer.json). Unset: a byte-level BPE
    of the model's vocabulary size is trained once on the corpus and cached."""
    attention_backend: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention kernel: "sdpa" runs anywhere, "flex" (FlexAttention) needs a GPU. "auto": as in the
    flavor, but "flex" for a document mask on a GPU."""
    attention_mask: Literal["auto", "causal", "document"] = "auto"
    """"causal": a token attends to all earlier tokens of its block; "document": only to those of
    its own document, and the first token of a document is not a target. "auto": as in the flavor.
    """
    dropout: Annotated[float, at_least(0), below(1)] = 0.0
    """Dropout probability of the residual updates, by a mask that depends on the seed, the step and
    the position only."""
    router_bias_update_rate: Annotated[float, at_least(0)] | None = None
    """Change per step of the bias that balances experts. Unset: as in the flavor."""
    router_balance_loss_weight: Annotated[float, at_least(0)] | None = None
    """Weight in the objective of the sequence-level balance loss of routers (DeepSeek-V3,
    arXiv:2412.19437), per layer with experts; the reported loss is without it. 0: none. Unset: as
    in the flavor."""
    router_z_loss_weight: Annotated[float, at_least(0)] | None = None
    """Weight in the objective of the z-loss of routers (ST-MoE, arXiv:2202.08906), such as 1e-3,
    per layer with experts: the mean over tokens of the squared log-sum-exp of the router's logits.
    The reported loss is without it. 0: none. Unset: as in the flavor."""
    mtp_depth: Annotated[int, at_least(0)] | None = None
    """Tokens beyond the next that training predicts, with one module each (multi-token prediction
    of DeepSeek-V3). 0: none. Unset: as in the flavor."""
    mtp_loss_weight: Annotated[float, at_least(0)] | None = None
    """Weight of the mean loss of these predictions in the objective; the reported loss is without
    it. Unset: as in the flavor."""
    converters: list[Literal["quantize.linear.float8", "lora"]] = []
    """Conversions of the model's modules before training: "quantize.linear.float8" computes linear
    layers in float8, see [quantize.linear.float8]; "lora" freezes all weights and trains adapters,
    see [lora]."""
    print_after_conversion: bool = False
    """Print the model's modules once they are built."""

    @property
    def uses_float8(self) -> bool:
        """Whether linear layers compute in float8."""
        return "quantize.linear.float8" in self.converters

    @property
    def uses_lora(self) -> bool:
        """Whether adapters are trained, and all other weights are frozen."""
        return "lora" in self.converters
