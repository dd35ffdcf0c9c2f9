"""Model families, one file each, found by name.

A family's file defines `FLAVORS`, its sizes by name, and `model_spec(config) -> ModelSpec`; for
models of Hugging Face's transformers also `ARCHITECTURES` and `dims_of_hugging_face(config_json)`.
Nothing else in the repository names it. Layer: above nn and spec.
"""

import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from pydantic import TypeAdapter, ValidationError, model_validator

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

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, given: Any) -> Any:
        """Put what config.json says in the place of flavor "hf", so that all that follows, and
        whoever reads the resolved configuration, needs the folder no more."""
        if not isinstance(given, dict) or given.get("flavor") != "hf" or given.get("dims"):
            return given
        folder = given.get("hf_assets_path")
        if not isinstance(folder, str):
            raise ValueError(
                'flavor "hf" takes the model from config.json in hf_assets_path, which is not set. '
                "Set it to the Hugging Face folder"
            )
        try:
            family, dims = hugging_face_dims(read_hugging_face_config(Path(folder).expanduser()))
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from None
        if given.get("name", family) != family:
            raise ValueError(
                f'name is "{given["name"]}", but {folder}/config.json is of "{family}". Set '
                f"model.name to it, or leave it out"
            )
        return given | {"name": family, "dims": dims}


def families() -> list[str]:
    """The names of all model families: the files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check_family(config: ModelConfig) -> None:
    """Raises ConfigError with the known names when the family does not exist."""
    if config.name not in families():
        raise ConfigError(_unknown("model.name", config.name, families()))


def model_spec(config: ModelConfig) -> ModelSpec:
    """The spec that `config` asks for.

    Raises ConfigError with the known names when the family or the flavor does not exist.
    """
    check_family(config)
    family = importlib.import_module(f"{__name__}.{config.name}")
    if config.flavor in family.FLAVORS and config.dims:
        raise ConfigError(
            f'model.flavor = "{config.flavor}" has sizes of its own, and model.dims gives others. '
            "Leave out one of them."
        )
    if config.flavor not in family.FLAVORS and not config.dims:
        raise ConfigError(_unknown("model.flavor", config.flavor, list(family.FLAVORS)))
    return family.model_spec(config)


def read_hugging_face_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. Raises ConfigError where there is none that can be
    read."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. It describes the model of a Hugging Face folder."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no table.")
    return values


def hugging_face_dims(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family, and the sizes as `[model] dims` takes them, of what a config.json describes.

    Raises ConfigError, with the architectures that are known, for another one, and for values that
    cannot be built here.
    """
    given = values.get("architectures")
    asked = given if isinstance(given, list) else []
    known: list[str] = []
    for name in families():
        family = importlib.import_module(f"{__name__}.{name}")
        architectures = getattr(family, "ARCHITECTURES", ())
        if any(architecture in architectures for architecture in asked):
            return name, plain_dims(family.dims_of_hugging_face(values))
        known += architectures
    raise ConfigError(
        f"config.json is of architecture {given!r:.200}. Known are: {', '.join(sorted(known))}."
    )


def hugging_face_model(values: Mapping[str, Any], hf_assets_path: str) -> ModelConfig:
    """The section of a run that trains what a config.json describes. Raises as `hugging_face_dims`
    does."""
    family, dims = hugging_face_dims(values)
    return ModelConfig(name=family, flavor="hf", dims=dims, hf_assets_path=hf_assets_path)


def plain_dims(dims: "DataclassInstance") -> dict[str, Any]:
    """The dimensions of a family as plain values, without those that are unset."""

    def given(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if value is not None}

    return asdict(dims, dict_factory=given)


_Dims = TypeVar("_Dims", bound="DataclassInstance")


def flavor_dims(flavors: Mapping[str, _Dims], config: ModelConfig) -> _Dims:
    """The dimensions of `config.flavor`, or those of `config.dims`, with the dropout, the attention
    and the balance of experts that `config` asks for, in a dataclass that has `dropout`,
    `attention_backend`, `document_mask` and, with experts, `moe`."""
    base = _parse_dims(flavors, config) if config.dims else flavors[config.flavor]
    changes: dict[str, Any] = {"dropout": config.dropout}
    if config.attention_backend != "auto":
        changes["attention_backend"] = config.attention_backend
    if config.attention_mask != "auto":
        changes["document_mask"] = config.attention_mask == "document"
    if config.router_bias_update_rate is not None:
        moe = getattr(base, "moe", None)
        if moe is None:
            raise ConfigError(
                f"model.router_bias_update_rate ({config.router_bias_update_rate}): {config.name} "
                f"{config.flavor} has no experts. Leave it out."
            )
        changes["moe"] = replace(moe, bias_update_rate=config.router_bias_update_rate)
    return replace(base, **changes)


def _parse_dims(flavors: Mapping[str, _Dims], config: ModelConfig) -> _Dims:
    kind = type(next(iter(flavors.values())))
    known = {field.name for field in fields(kind)}
    if unknown := sorted(config.dims.keys() - known):
        raise ConfigError(
            f"model.dims of {config.name} has {', '.join(unknown)}. Known are: "
            f"{', '.join(sorted(known))}."
        )
    try:
        return cast(_Dims, TypeAdapter(kind).validate_python(config.dims))
    except ValidationError as error:
        found = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"model.dims of {config.name}: {'; '.join(found)}.") from None


def _unknown(key: str, given: str, known: list[str]) -> str:
    by_lower = {name.lower(): name for name in known}
    nearest = get_close_matches(given.lower(), by_lower, n=1)
    hint = f' Did you mean "{by_lower[nearest[0]]}"?' if nearest else ""
    return f'{key} = "{given}" is not one of {", ".join(known)}.{hint}'
