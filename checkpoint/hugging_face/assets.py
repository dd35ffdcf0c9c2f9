"""The small files beside the weights: tokenizer, chat template, settings of generation.

Layer: above storage.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.log import logger

ASSETS = "assets"
"""Folder beside those of the steps."""
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


def keep_assets(source: Path, root: str) -> None:
    """Copy the files of the tokenizer in `source` to ROOT/assets, as a whole or not at all, so that
    the checkpoints in `root` are complete on their own; an object store gets none. Another
    tokenizer that is there is replaced, with a warning. A failure is a warning: training does not
    need the copy."""
    target = Path(root) / ASSETS
    if "://" in root:
        return
    beside = target.with_name(f"{ASSETS}.{os.getpid()}.tmp")
    try:
        if target.exists():
            if _same_files(source, target):
                return
            logger.warning("%s holds another tokenizer than this run's; it is replaced.", target)
        copy_assets(source, beside, Files())
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
    except OSError as error:
        logger.warning("The tokenizer could not be copied to %s: %s", target, error)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _same_files(one: Path, other: Path) -> bool:
    return all(
        (one / name).is_file() == (other / name).is_file()
        and (not (one / name).is_file() or (one / name).read_bytes() == (other / name).read_bytes())
        for name in _ASSETS
    )


def kept_assets(step_folder: str) -> Path | None:
    """The folder of the tokenizer files that `keep_assets` has left beside the folder of a step."""
    folder = Path(step_folder).parent / ASSETS
    return folder if "://" not in step_folder and (folder / "tokenizer.json").is_file() else None


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """As transformers writes its files."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
