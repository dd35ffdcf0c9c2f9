"""The ways to name checkpoints: the folder of a step, the folder of a run's steps, or the run's
output folder.

Every command that reads checkpoints takes all of them.
"""

from collections.abc import Iterator
from pathlib import Path

import tomli

from torchtitan_lite.checkpoint.format import MANIFEST, parse_step_name, step_name
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.urls import is_url, join_location, local_path, split

WAYS = "the folder of a step, the folder of a run's checkpoints, or the run's output folder"
"""For messages and help."""
_CONFIG = "config.toml"
_DEFAULT_FOLDER = "checkpoint"


def checkpoint_root(folder: str, dump_folder: Path) -> str:
    """Return the folder or the URL of a run's checkpoints: `folder` is checkpoint.folder. Raises
    ConfigError for a URL without "//"."""
    return folder if is_url(folder) else str(dump_folder / folder)


def find_steps(path: str) -> tuple[str, list[str]]:
    """Return the folder or URL of the checkpoints that `path` names, and the names of their steps,
    ascending: one if `path` is the folder of a step, none if there is no checkpoint (as in a
    Hugging Face folder, or a file). Raises OSError and CheckpointError as the storage does."""
    path = path.rstrip("/") or "/"
    if (file := local_path(path)) is not None and file.is_file():
        return path, []
    if is_step(path):
        root, name = split(path)
        return root, [name]
    for folder in _folders(path):
        storage = open_storage(folder)
        try:
            names = [step_name(step) for step in storage.steps()]
        finally:
            storage.close()
        if names:
            return folder, names
    return path, []


def newest_step(path: str) -> str:
    """Return the folder of the newest step that `path` names, or `path` if it names none. Raises
    as `find_steps`."""
    root, names = find_steps(path)
    if not names:
        return path
    newest = join_location(root, names[-1])
    if len(names) > 1:
        logger.info("Using %s, the newest of %d checkpoints.", newest, len(names))
    return newest


def is_step(path: str) -> bool:
    """Return whether `path` is the folder of a step."""
    if parse_step_name(split(path)[1]) is not None:
        return True
    folder = local_path(path)
    return folder is not None and (folder / MANIFEST).is_file()


def _folders(path: str) -> Iterator[str]:
    """Yield where the steps can be: in `path`, or where a run with this output folder has saved
    them."""
    yield path
    if (run := local_path(path)) is not None:
        for config in (run / _CONFIG, *sorted(run.glob(f"replica_*/{_CONFIG}"))):
            try:
                folder = tomli.loads(config.read_text())["checkpoint"]["folder"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            yield checkpoint_root(folder, run)
    yield join_location(path, _DEFAULT_FOLDER)
