"""User-defined tables and keys, as added by torchtitan's `job.custom_config_module`.

The module defines a class `JobConfig`: a dataclass, or a `Section`, with a field per table. A table
that exists here gains the fields of the user's class of that name; any other is new.
"""

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import Field, create_model

from torchtitan_lite.config.keys import has_text, section_in, text_at, without_constraints
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.tables.job import BUILT_IN_CONFIG_MODULES, CONFIG_MODULE_KEYS
from torchtitan_lite.config.tables.section import Section
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.registry import import_module

_IMPORT = ("experimental", "custom_import")


def schema_for(tables: Mapping[str, Any]) -> type[Config]:
    """Import the modules named in `tables` and return the schema extended by them.

    Raises ConfigError if a module does not exist or has no usable `JobConfig`.
    """
    if name := text_at(tables, _IMPORT):
        import_module(name, ".".join(_IMPORT))
    schema = Config
    for key in CONFIG_MODULE_KEYS:
        name = text_at(tables, key)
        if name and name not in BUILT_IN_CONFIG_MODULES:
            schema = _extended(schema, import_module(name, ".".join(key)), ".".join(key))
    return schema


def _extended(schema: type[Config], module: ModuleType, key: str) -> type[Config]:
    custom = getattr(module, "JobConfig", None)
    if not isinstance(custom, type):
        raise ConfigError(
            f'{key} = "{module.__name__}": the module has no class JobConfig. Define one whose '
            "fields are the tables that it adds."
        )
    return _merged(schema, custom, key)


def _merged(base: type[Section], custom: type, where: str) -> Any:
    """Return `base` with the fields of `custom`."""
    if issubclass(custom, base):
        return custom
    fields: dict[str, Any] = {}
    for name, kind, default in _fields_of(custom, where):
        known = base.model_fields.get(name)
        inner = known.annotation if known is not None else None
        if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Section)):
            table = section_in(inner)[0] or Section
            merged = _merged(table, kind, f"{where}: {name}")
            instance = default() if callable(default) else default
            fields[name] = (merged, merged(**_values(instance)))
        elif callable(default):
            fields[name] = (kind, Field(default_factory=default))
        else:
            fields[name] = (kind, default)
    text = custom.__doc__ or base.__doc__
    made = create_model(base.__name__, __base__=base, __doc__=text, **fields)
    # The docstrings under the fields are read from the source of the class that has them.
    made.source_class = custom
    return made


def _fields_of(custom: type, where: str) -> list[tuple[str, Any, Any]]:
    """Return name, type and default (a value or factory) of each field. Raises ConfigError for a
    field without default, or of a type that TOML does not have."""
    hints = get_type_hints(custom, include_extras=True)
    if dataclasses.is_dataclass(custom):
        missing = dataclasses.MISSING
        defaults = [
            (field.name, field.default_factory if field.default is missing else field.default)
            for field in dataclasses.fields(custom)
        ]
        required = {name for name, default in defaults if default is missing}
    elif issubclass(custom, Section):
        fields = custom.model_fields
        required = {name for name, field in fields.items() if field.is_required()}
        defaults = [
            (name, field.default_factory or field.default) for name, field in fields.items()
        ]
    else:
        raise ConfigError(
            f"{where}: {custom.__qualname__} is not a dataclass or a Section, so it has no fields."
        )
    for name, _ in defaults:
        if name in required:
            raise ConfigError(
                f"{where}: {custom.__qualname__}.{name} has no default. Give it one, so that a "
                "file need not set it."
            )
        kind = hints[name]
        is_table = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        if not is_table and not has_text(without_constraints(kind)):
            raise ConfigError(
                f"{where}: {custom.__qualname__}.{name} is of type {kind}, which a TOML file "
                "cannot have here. Use bool, int, float, str, Literal, list, dict or a table."
            )
    return [(name, hints[name], default) for name, default in defaults]


def _values(instance: Any) -> dict[str, Any]:
    """Return the fields of a default instance, by name."""
    if dataclasses.is_dataclass(instance) and not isinstance(instance, type):
        return dataclasses.asdict(instance)
    return instance.model_dump() if isinstance(instance, Section) else {}
