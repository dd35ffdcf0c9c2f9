"""The configuration of a run as a user gives it: a TOML file and options, completed by what a
Hugging Face folder says of its model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.config import Config, loading
from torchtitan_lite.core.errors import CheckpointError, ConfigError

_AUTO = "auto"
"""The family of a folder, whichever it is."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def parse_command_line(
    argv: Sequence[str], usage: Callable[[], str] | None = None
) -> tuple[Config, Path]:
    """Parse the arguments after the program's name. Returns the configuration and its file.

    `--help` prints `usage` and every key, `--help SECTION` the keys of one section; both raise
    SystemExit(0). Raises ConfigError with every problem.
    """
    return loading.parse_completed_command_line(argv, usage, complete=_complete)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the TOML file at `path` and apply command-line `overrides`.

    Raises ConfigError with every problem: unknown keys and sections, values of a wrong type or out
    of range, and unsupported features.
    """
    return loading.load_completed_config(path, overrides, complete=_complete)


def config_from(values: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Config:
    """Validate the tables `values` from `source` and apply command-line `overrides`. Raises as
    `load_config` does."""
    return loading.completed_config_from(values, source, overrides, complete=_complete)


def _complete(tables: dict[str, Any]) -> str | None:
    """Add to the tables of a file what a Hugging Face folder says. Returns the problem, if any."""
    return _read_hugging_face_dims(tables) or _find_initial_weights(tables)


def _find_initial_weights(tables: dict[str, Any]) -> str | None:
    """Set `checkpoint.initial_load_path` to the Hugging Face folder of the model if
    `initial_load_in_hf` asks for it, as in torchtitan. Returns the problem, if any."""
    model, checkpoint = tables.get("model"), tables.get("checkpoint")
    if not isinstance(checkpoint, dict) or checkpoint.get("initial_load_in_hf") is not True:
        return None
    if checkpoint.get("enable") is not True or checkpoint.get("initial_load_path") is not None:
        return None
    asked = "checkpoint.initial_load_in_hf = true without initial_load_path"
    folder = model.get("hf_assets_path") if isinstance(model, dict) else None
    if not isinstance(folder, str):
        return f"{asked} loads the weights in model.hf_assets_path, which is not set. Set either."
    weights = Path(folder).expanduser()
    if not any((weights / name).is_file() for name in _WEIGHTS):
        # Importing a model family imports torch, which takes seconds.
        from torchtitan_lite.models import folder_problem

        problem = folder_problem(weights) or f"{folder} has neither {' nor '.join(_WEIGHTS)}."
        return (
            f"{asked} loads the weights in model.hf_assets_path, and {problem} Set "
            "initial_load_path to the folder that has them."
        )
    checkpoint["initial_load_path"] = folder
    return None


def _read_hugging_face_dims(tables: dict[str, Any]) -> str | None:
    """Replace flavor "hf", which is that of a folder with a config.json if no model is named, by
    the family and the dimensions there, so that the resolved configuration does not depend on the
    folder. Returns the problem, if any."""
    model = tables.get("model")
    if not isinstance(model, dict) or model.get("dims"):
        return None
    folder = model.get("hf_assets_path")
    is_named = model.get("name", _AUTO) != _AUTO or "flavor" in model
    if not is_named and _has_config(folder):
        model["flavor"] = "hf"
    if model.get("flavor") != "hf":
        return None
    if not isinstance(folder, str):
        return (
            'flavor "hf" reads the model from config.json in hf_assets_path, which is not set. '
            "Set it to the Hugging Face folder."
        )
    # Importing a model family imports torch, which takes seconds.
    from torchtitan_lite.checkpoint.convert.hugging_face import check_counts_of
    from torchtitan_lite.models import hugging_face_dims, read_hugging_face_config

    path = Path(folder).expanduser()
    try:
        values = read_hugging_face_config(path)
        check_counts_of(path, values)
        family, dims = hugging_face_dims(values, str(path / "config.json"))
    except (CheckpointError, ConfigError) as error:
        return str(error)
    if model.get("name", _AUTO) not in (family, _AUTO):
        return (
            f'name is "{model["name"]}", but {folder}/config.json is of "{family}". Set '
            "model.name to it, or omit it."
        )
    model |= {"name": family, "dims": dims}
    return None


def _has_config(folder: Any) -> bool:
    return isinstance(folder, str) and (Path(folder).expanduser() / "config.json").is_file()
