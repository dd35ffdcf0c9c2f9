"""Loading a configuration: the file, then the command line over it, then validation.

Invariant: every problem of both is found in one go. Layer: above overrides, problems, toml_file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from torchtitan_lite.config import problems
from torchtitan_lite.config.keys import section_in, split_none, type_at, without_constraints
from torchtitan_lite.config.overrides import COMMAND_LINE, Override, parse_overrides
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml_file import read_toml
from torchtitan_lite.config.unsupported import unsupported_feature
from torchtitan_lite.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of the TOML file at `path` with command-line `overrides` over it.

    Raises ConfigError that names every problem: unknown keys and sections, values of a wrong type
    or out of range, and features that are not supported.
    """
    return config_from(read_toml(Path(path)), str(path), overrides)


def config_from(given: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of the tables `given`, which are from `source`, with command-line
    `overrides` over them. Raises as `load_config` does; a file for a feature of torchtitan that
    does not exist here is one problem, however many unknown keys it has."""
    found: list[str] = []
    tables = _known(given, Config, (), source, found)
    parsed = parse_overrides(overrides, Config)
    found += [override.problem for override in parsed if override.problem]
    for override in parsed:
        _put(tables, override)
    overridden = [override.path for override in parsed if override.path]

    def where(key: problems.Path) -> str:
        names = tuple(part for part in key if isinstance(part, str))
        if any(names[: len(one)] == one for one in overridden):
            return COMMAND_LINE
        below = any(one[: len(names)] == names for one in overridden)
        return f"{source} and {COMMAND_LINE}" if below else source

    if feature := unsupported_feature(tables):
        path, problem = feature
        raise problems.config_error([f"{where(path)}: {problem}"])
    if problem := _read_hugging_face_dims(tables):
        found.append(f"{where(('model',))}: model: {problem}")
    try:
        config = Config.model_validate(tables)
    except ValidationError as error:
        found += problems.from_validation(error, Config, where)
        raise problems.config_error(found) from None
    if found:
        raise problems.config_error(found)
    return config


def _read_hugging_face_dims(tables: dict[str, Any]) -> str | None:
    """Replace flavor "hf" by the family and the dimensions in config.json, so that whoever reads
    the resolved configuration does not need the folder. Returns the problem, if any."""
    model = tables.get("model")
    if not isinstance(model, dict) or model.get("flavor") != "hf" or model.get("dims"):
        return None
    folder = model.get("hf_assets_path")
    if not isinstance(folder, str):
        return (
            'flavor "hf" reads the model from config.json in hf_assets_path, which is not set. '
            "Set it to the Hugging Face folder."
        )
    # Importing a model family imports torch, which takes seconds.
    from torchtitan_lite.models import hugging_face_dims, read_hugging_face_config

    try:
        family, dims = hugging_face_dims(read_hugging_face_config(Path(folder).expanduser()))
    except ConfigError as error:
        return str(error)
    if model.get("name", family) != family:
        return (
            f'name is "{model["name"]}", but {folder}/config.json is of "{family}". Set '
            "model.name to it, or omit it."
        )
    model |= {"name": family, "dims": dims}
    return None


def _known(
    table: dict[str, Any],
    section: type[BaseModel],
    path: problems.Path,
    where: str,
    found: list[str],
) -> dict[str, Any]:
    """`table` without the names that `section` does not have; each is a problem in `found`."""
    kept: dict[str, Any] = {}
    for name, value in table.items():
        here = (*path, name)
        field = section.model_fields.get(name)
        if field is None:
            found.append(f"{where}: {_unknown(here, value)}")
            continue
        type_ = without_constraints(field.annotation)
        inner, is_list = section_in(type_)
        if inner is not None and not is_list and isinstance(value, dict):
            kept[name] = _known(value, inner, here, where, found)
        elif inner is not None and is_list and isinstance(value, list):
            kept[name] = [
                _known(element, inner, (*here, index), where, found)
                if isinstance(element, dict)
                else element
                for index, element in enumerate(value)
            ]
        else:
            # TOML has no null, but some keys mean something by it that is not their default.
            is_null = value == "none" and split_none(type_)[1]
            kept[name] = None if is_null else value
    return kept


def _unknown(path: problems.Path, value: Any) -> str:
    *outer, name = path
    if outer:
        return problems.unknown_key(Config, path)
    name = str(name)
    if isinstance(value, dict):
        return problems.unknown_section(Config, name)
    return problems.without_section(Config, name)


def _put(tables: dict[str, Any], override: Override) -> None:
    """Write the override into `tables`. One that could not be read takes the file's value away, so
    that the key is not reported twice."""
    if not override.path:
        return
    *outer, name = override.path
    for part in outer:
        inner = tables.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        tables = inner
    if override.problem is None:
        tables[name] = override.value
    elif type_at(Config, override.path) is not None and not isinstance(tables.get(name), dict):
        tables.pop(name, None)
