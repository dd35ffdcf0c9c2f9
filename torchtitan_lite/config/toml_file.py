"""Reading a TOML file, and writing the resolved configuration, which loads as an equal one."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli
import tomli_w
from pydantic import BaseModel

from torchtitan_lite.config.keys import split_none, without_constraints
from torchtitan_lite.config.schema import Config
from torchtitan_lite.core.errors import ConfigError

_CONFIGS = Path("configs")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of the file. Raises ConfigError if it is missing or not TOML."""
    try:
        # Editors on Windows write a byte order mark.
        return tomli.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. {known_files(path)}".rstrip()) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start}).") from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.{_syntax_hint(error)}") from None


def to_toml(config: Config) -> str:
    """Return the resolved configuration as TOML. A null is omitted if it is the default, else
    written as "none"."""
    return tomli_w.dumps(_tables(config))


def known_files(wanted: Path | None = None) -> str:
    """Return a sentence with the TOML files in `configs/` and in the folder of `wanted`, closest
    names first."""
    folders = [_CONFIGS] if wanted is None else [wanted.parent, _CONFIGS]
    files = {str(file): file for folder in folders for file in sorted(folder.glob("*.toml"))}
    if wanted is not None:
        nearest = get_close_matches(wanted.stem, {file.stem for file in files.values()}, n=3)
        names = [name for stem in nearest for name, file in files.items() if file.stem == stem]
        if names:
            return f"Did you mean {' or '.join(names)}?"
    return f"There are {', '.join(files)}." if files else ""


def _tables(section: BaseModel) -> dict[str, Any]:
    written = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if value is None:
            if field.get_default(call_default_factory=True) is not None:
                written[name] = "none"
        elif isinstance(value, BaseModel):
            written[name] = _tables(value)
        elif split_none(without_constraints(field.annotation))[0] is float:
            written[name] = float(value)
        elif isinstance(value, list):
            written[name] = [_tables(v) if isinstance(v, BaseModel) else v for v in value]
        else:
            written[name] = value
    return written


def _syntax_hint(error: tomli.TOMLDecodeError) -> str:
    lines = error.doc.splitlines()
    if not 0 < error.lineno <= len(lines):
        return ""
    hint = f" The line is: {lines[error.lineno - 1].strip()}"
    if error.msg == "Invalid value":
        hint += '  (text needs quotes; write true and false in lower case, and "none" for null)'
    return hint
