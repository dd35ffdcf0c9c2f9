"""Model families, one file each, found by name.

A family's file defines `FLAVORS`, its sizes by name, and `model_spec(config) -> ModelSpec`; for
models of Hugging Face's transformers also `ARCHITECTURES` and `dims_of_hugging_face(config_json)`.
No other code of the package names it.
"""

import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from torchtitan_lite.core._links import refuse_other_name

refuse_other_name(__name__)

from torchtitan_lite.config.tables.model import ModelConfig  # noqa: E402
from torchtitan_lite.core.errors import ConfigError  # noqa: E402
from torchtitan_lite.core.registry import REGISTRY, import_module, unknown_name  # noqa: E402
from torchtitan_lite.nn.hugging_face.config import find_architecture, naming  # noqa: E402
from torchtitan_lite.nn.spec import ModelSpec  # noqa: E402


def families() -> list[str]:
    """Return the names of all model families: the files in this folder, and registered ones."""
    return sorted({*(module.name for module in pkgutil.iter_modules(__path__)), *REGISTRY.models})


def family(name: str) -> Any:
    """Return the module of a model family."""
    if name in REGISTRY.models:
        if name in (module.name for module in pkgutil.iter_modules(__path__)):
            raise ConfigError(
                f'{REGISTRY.models[name]} registers the model family "{name}", which is a name of '
                "this package. Choose another one."
            )
        return import_module(REGISTRY.models[name], f"the module of model family {name}")
    return importlib.import_module(f"{__name__}.{name}")


def check_family(config: ModelConfig) -> None:
    """Raise ConfigError with the known names if the family does not exist."""
    if config.name not in families():
        raise ConfigError(
            f"{unknown_name('model.name', config.name, families())} Another one is registered by "
            "the module that experimental.custom_import or --custom-import names."
        )


def is_flavor(name: str, flavor: str) -> bool:
    """Whether a model family has this flavor."""
    return name in families() and flavor in family(name).FLAVORS


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the spec for `config`, with the names of its family and flavor. Raises ConfigError
    with the known names if they do not exist."""
    check_family(config)
    module = family(config.name)
    if config.flavor in module.FLAVORS and config.dims:
        raise ConfigError(
            f'model.flavor = "{config.flavor}" has sizes of its own, and model.dims gives others. '
            "Leave out one of them."
        )
    if config.flavor not in module.FLAVORS and not config.dims:
        of_folder = [] if config.hf_assets_path is None else ["hf"]
        raise ConfigError(
            unknown_name("model.flavor", config.flavor, [*module.FLAVORS, *of_folder])
        )
    # A user's family may be built on another one.
    return replace(module.model_spec(config), name=config.name, flavor=config.flavor)


def read_hugging_face_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face folder. Raises ConfigError if it cannot be read."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            folder_problem(folder)
            or f"{path} is missing. It describes the model of a Hugging Face folder."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}. Download it again.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object.")
    return values


def folder_problem(path: Path) -> str | None:
    """Return why a path without the files of a Hugging Face folder is not one: it is missing, a
    file, or holds GGUF. None if it is another folder."""
    if not path.exists():
        return (
            f"{path} does not exist. Give a folder on this machine; hf download NAME --local-dir "
            "DIR gets one of the hub."
        )
    gguf = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if gguf and gguf[0].suffix == ".gguf":
        return (
            f"{gguf[0]} is a GGUF file, which is not supported. Give the folder of the model's "
            "safetensors, or convert it with transformers: AutoModelForCausalLM.from_pretrained("
            "DIR, gguf_file=NAME).save_pretrained(OUT)."
        )
    return None if path.is_dir() else f"{path} is a file. Give its folder, {path.parent}."


def hugging_face_dims(
    values: Mapping[str, Any], file: str = "config.json"
) -> tuple[str, dict[str, Any]]:
    """Return the family and the sizes, as in `[model] dims`, of the config.json `file`. Raises
    ConfigError with its name for an unknown architecture, with the known ones, and for unsupported
    values."""
    of_families = {name: getattr(family(name), "ARCHITECTURES", {}) for name in families()}
    known = {name: kind for of_family in of_families.values() for name, kind in of_family.items()}
    with naming(file):
        architecture = _architecture(values, known)
        name = next(name for name, of_family in of_families.items() if architecture in of_family)
        return name, plain_dims(family(name).dims_of_hugging_face(values))


def _architecture(values: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """Return the architecture of a config.json. Raises ConfigError if it is not known, or not of a
    model that predicts the next token."""
    # Families import this module.
    from torchtitan_lite.models.auto.missing_parts import missing_part

    model_type, architectures = values.get("model_type"), values.get("architectures")
    is_known = model_type in known.values()
    if not is_known and (part := missing_part(model_type)):
        raise ConfigError(
            f"model_type {model_type!r:.60} (architectures {architectures!r:.200}) needs {part}: "
            "that is not supported. docs/models.md lists what is."
        )
    architecture = find_architecture(values, known)
    if architecture is None:
        types = sorted(set(known.values()))
        raise ConfigError(
            f"{unknown_name('model_type', str(model_type or '')[:60], types)} It decides, as in "
            f"transformers; architectures ({architectures!r:.200}) does for code of the folder "
            "(auto_map)."
        )
    names = architectures if isinstance(architectures, list) else [architectures]
    if any(names) and not any(name in known or str(name).endswith("ForCausalLM") for name in names):
        raise ConfigError(
            f"architectures is {architectures!r:.200}, which does not predict the next token. "
            f"Known are: {', '.join(sorted(known))}."
        )
    return architecture


def hugging_face_model(
    values: Mapping[str, Any], hf_assets_path: str, file: str = "config.json"
) -> ModelConfig:
    """Return the model section for the config.json `file`. Raises as `hugging_face_dims` does."""
    family, dims = hugging_face_dims(values, file)
    return ModelConfig(name=family, flavor="hf", dims=dims, hf_assets_path=hf_assets_path)


def recorded_dims(config: ModelConfig) -> dict[str, Any]:
    """Return the dimensions of the flavor, or those of `dims` with their defaults, as plain values
    for a checkpoint, unset ones included: a flavor of the same name may change."""
    return _as_json(asdict(_base_dims(family(config.name).FLAVORS, config)))


def plain_dims(dims: "DataclassInstance") -> dict[str, Any]:
    """Return the dimensions of a family as plain values, without unset ones."""

    def given(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if value is not None}

    return _as_json(asdict(dims, dict_factory=given))


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as a manifest has them: a tuple is a list there."""
    return json.loads(json.dumps(values))


_Dims = TypeVar("_Dims", bound="DataclassInstance")


def flavor_dims(flavors: Mapping[str, _Dims], config: ModelConfig) -> _Dims:
    """Return the dimensions of `config.flavor`, or of `config.dims`, with the configured dropout,
    attention and balancing, in a dataclass that has `dropout`, `attention_backend`, `document_mask`
    and, with experts, `moe`."""
    base = _base_dims(flavors, config)
    changes: dict[str, Any] = {"dropout": config.dropout}
    if config.attention_backend != "auto":
        changes["attention_backend"] = config.attention_backend
    if config.attention_mask != "auto":
        changes["document_mask"] = config.attention_mask == "document"
    moe = getattr(base, "moe", None)
    for name in ("bias_update_rate", "balance_loss_weight", "z_loss_weight"):
        value = getattr(config, f"router_{name}")
        if value is None:
            continue
        if moe is None:
            raise ConfigError(
                f"model.router_{name} ({value}): {config.name} {config.flavor} has no experts. "
                "Leave it out."
            )
        moe = changes["moe"] = replace(moe, **{name: value})
    for name in ("mtp_depth", "mtp_loss_weight"):
        value = getattr(config, name)
        if value is not None and not hasattr(base, name):
            raise ConfigError(
                f"model.{name} ({value}): {config.name} {config.flavor} has no multi-token "
                "prediction. Leave it out, or choose deepseek_v3."
            )
        if value is not None:
            changes[name] = value
    return replace(base, **changes)


def _base_dims(flavors: Mapping[str, _Dims], config: ModelConfig) -> _Dims:
    return _parse_dims(flavors, config) if config.dims else flavors[config.flavor]


def _parse_dims(flavors: Mapping[str, _Dims], config: ModelConfig) -> _Dims:
    if not flavors:
        raise ConfigError(
            f"The model family {config.name} has no flavor, of whose type model.dims could be: add "
            "one to its FLAVORS."
        )
    kind = type(next(iter(flavors.values())))
    known = {field.name for field in fields(kind)}
    if unknown := sorted(config.dims.keys() - known):
        raise ConfigError(
            f"model.dims of {config.name} has {', '.join(unknown)}. Known are: "
            f"{', '.join(sorted(known))}."
        )
    try:
        dims = cast(_Dims, TypeAdapter(kind).validate_python(config.dims))
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        )
        raise ConfigError(f"model.dims of {config.name}: {'; '.join(problems)}.") from None
    # pydantic drops unknown keys of dataclasses.
    if unknown := list(_unknown_keys(config.dims, asdict(dims))):
        raise ConfigError(f"model.dims of {config.name}: {'; '.join(unknown)}.")
    return dims


def _unknown_keys(values: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if key not in known:
            yield f"{key} is not one of {', '.join(known)}"
        elif isinstance(value, Mapping) and isinstance(known[key], Mapping):
            yield from (f"{key}.{text}" for text in _unknown_keys(value, known[key]))
