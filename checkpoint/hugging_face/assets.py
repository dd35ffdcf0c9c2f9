"""The small files beside the weights: tokenizer, chat template, settings of generation.

Layer: above storage.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.storage.files import Files

GENERATION = "generation_config.json"
_ASSETS = (
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def copy_assets(
    source: Path, target: Path, files: Files, *, also: tuple[str, ...] = ()
) -> list[str]:
    """Copy the files that are there, durably, and return their names. What is linked is copied."""
    files.make_folders(target)
    found = [name for name in (*_ASSETS, *also) if (source / name).is_file()]
    for name in found:
        files.write_file(target / name, files.read(source / name))
    files.sync_folder(target)
    return found


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """As transformers writes its files."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
