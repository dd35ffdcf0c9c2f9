"""The configuration of a run as a user gives it: a TOML file and options, completed by what a
Hugging Face folder says of its model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.config import Config, loading
from torchtitan_lite.core.errors import ConfigError


def parse_command_line(
    argv: Sequence[str], usage: Callable[[], str] | None = None
) -> tuple[Config, Path]:
    """Parse the arguments after the program's name. Returns the configuration and its file.

    `--help` prints `usage` and every key, `--help SECTION` the keys of one section; both raise
    SystemExit(0). Raises ConfigError with every problem.
    """
    return loading.parse_command_line(argv, usage, complete=_read_hugging_face_dims)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the TOML file at `path` and apply command-line `overrides`.

    Raises ConfigError with every problem: unknown keys and sections, values of a wrong type or out
    of range, and unsupported features.
    """
    return loading.load_config(path, overrides, complete=_read_hugging_face_dims)


def config_from(given: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Config:
    """Validate the tables `given` from `source` and apply command-line `overrides`. Raises as
    `load_config` does."""
    return loading.config_from(given, source, overrides, complete=_read_hugging_face_dims)


def _read_hugging_face_dims(tables: dict[str, Any]) -> str | None:
    """Replace flavor "hf" by the family and the dimensions in config.json, so that the resolved
    configuration does not depend on the folder. Returns the problem, if any."""
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
