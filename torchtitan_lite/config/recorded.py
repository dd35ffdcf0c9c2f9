"""The configuration that a checkpoint records of the run that wrote it. Layer: above schema."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from torchtitan_lite.config.keys import section_in, text_at, without_constraints
from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.schema.job import CONFIG_MODULE_KEYS


def _known(table: Any, section: type[BaseModel]) -> Any:
    """`table` without the keys that `section` does not have."""
    if not isinstance(table, Mapping):
        return table
    kept = {}
    for name, value in table.items():
        if (field := section.model_fields.get(name)) is not None:
            inner, is_list = section_in(without_constraints(field.annotation))
            kept[name] = value if inner is None or is_list else _known(value, inner)
    return kept


def recorded_config(recorded: Mapping[str, Any], where: str) -> Config:
    """The configuration in the manifest of `where`. Raises CheckpointError if it is damaged.

    A module that the checkpoint names is not imported: the keys that it added are left out.
    """
    is_extended = any(text_at(recorded, key) for key in CONFIG_MODULE_KEYS)
    try:
        return Config.model_validate(_known(recorded, Config) if is_extended else recorded)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"The configuration in the manifest of {where} is "
            f"wrong at {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
