"""The configuration recorded in a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from torchtitan_lite.config.keys import section_in, text_at, without_constraints
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.tables.job import CONFIG_MODULE_KEYS
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.log import warn_on_rank_0
from torchtitan_lite.models import is_flavor, recorded_dims
from torchtitan_lite.nn.spec import differing_dims


def _known(table: Any, section: type[BaseModel]) -> Any:
    """Return `table` without the keys that `section` does not have."""
    if not isinstance(table, Mapping):
        return table
    kept = {}
    for name, value in table.items():
        if (field := section.model_fields.get(name)) is not None:
            inner, is_list = section_in(without_constraints(field.annotation))
            kept[name] = value if inner is None or is_list else _known(value, inner)
    return kept


_RECORDED = "recorded"
"""Flavor of a model whose dimensions differ from today's flavor of its name."""


def to_record(config: Config) -> dict[str, Any]:
    """Return the configuration as a checkpoint records it: with the dimensions of its flavor, and
    with absolute paths."""
    values = config.model_dump()
    values["model"]["dims"] = recorded_dims(config.model)
    if config.model.hf_assets_path is not None:
        path = Path(config.model.hf_assets_path).expanduser().absolute()
        values["model"]["hf_assets_path"] = str(path)
    return values


def recorded_config(
    recorded: Mapping[str, Any], where: str, *, needs_flavor: bool = False
) -> Config:
    """Load the configuration in the manifest of `where`. Raises CheckpointError if it is damaged.

    If the dimensions of the flavor have changed since, the recorded ones are used, with a warning
    and as flavor "recorded"; with `needs_flavor` that is a CheckpointError. Modules named in the
    checkpoint are not imported: the keys that they added are dropped.
    """
    is_extended = any(text_at(recorded, key) for key in CONFIG_MODULE_KEYS)
    try:
        config = Config.model_validate(_known(recorded, Config) if is_extended else recorded)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"The configuration in the manifest of {where} is "
            f"wrong at {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    model = config.model
    if not is_flavor(model.name, model.flavor):
        return config
    if not model.dims:
        warn_on_rank_0(
            "%s does not record the dimensions of its model: using those of the current %s %s.",
            where,
            model.name,
            model.flavor,
        )
        return config
    changes: dict[str, Any] = {"dims": {}}
    today = recorded_dims(model.model_copy(update=changes))
    if differing := differing_dims(model.dims, today):
        changed = (
            f"{where} was trained as {model.name} {model.flavor} with other dimensions than that "
            f"flavor has: {'; '.join(differing)}."
        )
        if needs_flavor:
            raise CheckpointError(f"{changed} The flavor of that name would give other logits.")
        warn_on_rank_0("%s The recorded ones are used.", changed)
        changes = {"flavor": _RECORDED}
    return config.model_copy(update={"model": model.model_copy(update=changes)})
