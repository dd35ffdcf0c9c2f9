"""Model families, one file each, found by name.

A family's file defines `FLAVORS`, its sizes by name, and `model_spec(config) -> ModelSpec`; nothing
else in the repository names it. Layer: above nn and spec.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from torchtitan_lite._links import refuse_other_name

refuse_other_name(__name__)

from torchtitan_lite.errors import ConfigError  # noqa: E402
from torchtitan_lite.section import Section, at_least, below  # noqa: E402
from torchtitan_lite.spec import ModelSpec  # noqa: E402


class ModelConfig(Section):
    """Which model to train."""

    name: str = "llama3"
    """Model family: the name of a file in `models/`."""
    flavor: str = "debugmodel"
    """Size of the model within its family."""
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


def families() -> list[str]:
    """The names of all model families: the files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def model_spec(config: ModelConfig) -> ModelSpec:
    """The spec that `config` asks for.

    Raises ConfigError with the known names when the family or the flavor does not exist.
    """
    if config.name not in families():
        raise ConfigError(_unknown("model.name", config.name, families()))
    family = importlib.import_module(f"{__name__}.{config.name}")
    if config.flavor not in family.FLAVORS:
        raise ConfigError(_unknown("model.flavor", config.flavor, list(family.FLAVORS)))
    return family.model_spec(config)


_Dims = TypeVar("_Dims", bound="DataclassInstance")


def flavor_dims(flavors: Mapping[str, _Dims], config: ModelConfig) -> _Dims:
    """The dimensions of `config.flavor`, with the dropout, the attention and the balance of experts
    that `config` asks for, in a dataclass that has `dropout`, `attention_backend`,
    `document_mask` and, with experts, `moe`."""
    changes: dict[str, Any] = {"dropout": config.dropout}
    if config.attention_backend != "auto":
        changes["attention_backend"] = config.attention_backend
    if config.attention_mask != "auto":
        changes["document_mask"] = config.attention_mask == "document"
    if config.router_bias_update_rate is not None:
        moe = getattr(flavors[config.flavor], "moe", None)
        if moe is None:
            raise ConfigError(
                f"model.router_bias_update_rate ({config.router_bias_update_rate}): {config.name} "
                f"{config.flavor} has no experts. Leave it out."
            )
        changes["moe"] = replace(moe, bias_update_rate=config.router_bias_update_rate)
    return replace(flavors[config.flavor], **changes)


def _unknown(key: str, given: str, known: list[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    nearest = get_close_matches(given.lower(), by_lower, n=1)
    hint = f' Did you mean "{by_lower[nearest[0]]}"?' if nearest else ""
    return f'{key} = "{given}" is not one of {", ".join(known)}.{hint}'
