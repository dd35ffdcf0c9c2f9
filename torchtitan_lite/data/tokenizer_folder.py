"""The settings of a tokenizer's folder, merged from the files of all releases of transformers.

Invariant: a value is the one that transformers takes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.core.errors import DataError

CONFIG = "tokenizer_config.json"
FILES = ("tokenizer.json", CONFIG, "special_tokens_map.json", "added_tokens.json")
"""Files that decide how a text is encoded."""
SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; in folders of early releases, where it does not list the added
    tokens, also special_tokens_map.json and added_tokens.json. Raises DataError."""
    config = read_object(folder / CONFIG)
    if "added_tokens_decoder" in config:
        return config
    config |= read_object(folder / "special_tokens_map.json")
    special = {token_text(config[key]) for key in SPECIAL_TOKENS if config.get(key) is not None}
    added = {
        str(id): {"content": text, "special": text in special, "normalized": text not in special}
        for text, id in read_object(folder / "added_tokens.json").items()
    }
    return {**config, "added_tokens_decoder": added} if added else config


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the named tokens, the usual ones and those of a model, such as
    `image_token`."""
    more = config.get("extra_special_tokens")
    named = {**config, **(more if isinstance(more, dict) else {})}
    usual = (name for name in named if name.endswith("_token"))
    names = [*usual, *(more if isinstance(more, dict) else ())]
    return {name: token_text(named[name]) for name in names if isinstance(named[name], str | dict)}


def token_text(token: Any) -> str:
    """Return the text of a token, which is given as such or with its options."""
    return str(token["content"]) if isinstance(token, dict) and "content" in token else str(token)


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file. Raises DataError."""
    try:
        # The bytes, because they may begin with a byte order mark.
        values = json.loads(file.read_bytes()) if file.is_file() else {}
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{file} is not a JSON object, which maps names to settings.")
    return values
