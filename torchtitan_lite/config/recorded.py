"""The configuration that a checkpoint records of the run that wrote it. Layer: above schema."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import CheckpointError


def recorded_config(recorded: Mapping[str, Any], where: str) -> Config:
    """The configuration in the manifest of `where`. Raises CheckpointError where it is none."""
    try:
        return Config.model_validate(recorded)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{where} does not tell of which model it is: the configuration in its manifest is "
            f"wrong at {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
