"""Tables and keys of a user's own, as torchtitan's `job.custom_config_module` adds them.

The module defines a class `JobConfig`: a dataclass, or a `Section`, with a field per table. A table
that exists here gains the fields of the user's class of that name; any other is new. Layer: above
schema and extension.
"""

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import Field, create_model

from torchtitan_lite.config.keys import section_in
from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.extension import import_module
from torchtitan_lite.schema.job import BUILT_IN_CONFIG_MODULES
from torchtitan_lite.schema.section import Section

_IMPORT = ("experimental", "custom_import")
_MODULES = (("job", "custom_config_module"), ("experimental", "custom_args_module"))


def schema_for(tables: Mapping[str, Any]) -> type[Config]:
    """Import the modules that `tables` name, and return the schema that they extend `Config` to.

    Raises ConfigError if a module does not exist or has no usable `JobConfig`.
    """
    if name := _text(tables, _IMPORT):
        import_module(name, ".".join(_IMPORT))
    schema = Config
    for key in _MODULES:
        name = _text(tables, key)
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
    """`base` with the fields of `custom`."""
    if issubclass(custom, base):
        return custom
    fields: dict[str, Any] = {}
    for name, kind, default in _fields_of(custom, where):
        known = base.model_fields.get(name)
        inner = known.annotation if known is not None else None
        if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Section)):
            table = section_in(inner)[0] or Section
            merged = _merged(table, kind, f"{where}: {name}")
            fields[name] = (merged, merged())
        else:
            fields[name] = (kind, default)
    text = custom.__doc__ or base.__doc__
    made = create_model(base.__name__, __base__=base, __doc__=text, **fields)
    # The docstrings under the fields are read from the source of the class that has them.
    made.source_class = custom
    return made


def _fields_of(custom: type, where: str) -> list[tuple[str, Any, Any]]:
    """Name, type and default of each field. Raises ConfigError for a field without default."""
    hints = get_type_hints(custom, include_extras=True)
    if dataclasses.is_dataclass(custom):
        found = []
        for one in dataclasses.fields(custom):
            default: Any = ...
            if one.default is not dataclasses.MISSING:
                default = one.default
            elif one.default_factory is not dataclasses.MISSING:
                default = Field(default_factory=one.default_factory)
            found.append((one.name, hints[one.name], default))
    elif issubclass(custom, Section):
        found = [(name, hints[name], field) for name, field in custom.model_fields.items()]
    else:
        raise ConfigError(
            f"{where}: {custom.__qualname__} is not a dataclass or a Section, so it has no fields."
        )
    for name, _, default in found:
        if default is ...:
            raise ConfigError(
                f"{where}: {custom.__qualname__}.{name} has no default. Give it one, so that a "
                "file need not set it."
            )
    return found


def _text(tables: Mapping[str, Any], key: tuple[str, str]) -> str:
    table = tables.get(key[0])
    value = table.get(key[1]) if isinstance(table, Mapping) else None
    return value if isinstance(value, str) else ""
