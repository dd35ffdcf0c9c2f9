"""A Hugging Face folder: config.json, index, safetensors headers, and tokenizer assets.

Invariant: only safetensors are read, headers are checked against file lengths, and no name in an
index leads out of the folder; links, as in the hub's cache, are allowed.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpoint.storage.base import Storage, exists, open_parent_storage
from torchtitan_lite.checkpoint.storage.files import Files
from torchtitan_lite.checkpoint.tensors import DTYPES
from torchtitan_lite.core.errors import CheckpointError, DamagedCheckpoint
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.urls import local_path
from torchtitan_lite.models import folder_problem

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors", re.ASCII)
_COUNTS = {
    "num_hidden_layers": re.compile(r"\.(\d{1,9})\.", re.ASCII),
    "*n*_experts": re.compile(r"experts\.(\d{1,9})\.", re.ASCII),
}
"""Keys of config.json, as patterns, and the numbers in the names of tensors that they count: the
first one in a name is that of its layer."""
_SHOWN = 20
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
ASSETS = "assets"
"""Folder for assets, beside the folders of the steps."""
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


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in a file's header, and its byte range in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True)
class IndexedTensor:
    """A tensor and its file."""

    file: str
    tensor: HeaderEntry


class HuggingFaceFolder:
    """The Hugging Face folder `name` in `storage`."""

    def __init__(self, storage: Storage, name: str) -> None:
        """Raises CheckpointError for a folder of another kind, and DamagedCheckpoint if files are
        missing or contradict the index or their headers."""
        self.storage, self.name = storage, name
        self.where = f"{storage.root}/{name}"
        self.config = _read_json(storage, f"{name}/{CONFIG}")
        # Same precedence as transformers.
        self.tensors = self._read_one(WEIGHTS) if self._has(WEIGHTS) else self._read_index()
        check_counts(self.config, self.tensors, self.where)

    def path(self, file: str) -> str:
        """Return the path in the storage."""
        return f"{self.name}/{file}"

    @property
    def files(self) -> list[str]:
        """Files that hold tensors."""
        return sorted({located.file for located in self.tensors.values()})

    def _has(self, file: str) -> bool:
        return exists(self.storage, self.path(file))

    def _read_one(self, file: str) -> dict[str, IndexedTensor]:
        header = read_header(self.storage, self.path(file))
        return {key: IndexedTensor(file, tensor) for key, tensor in header.items()}

    def _read_index(self) -> dict[str, IndexedTensor]:
        where = f"{self.where}/{INDEX}"
        if not self._has(INDEX):
            raise CheckpointError(f"{self.where} holds neither {WEIGHTS} nor {INDEX}.")
        names = _read_json(self.storage, self.path(INDEX)).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise DamagedCheckpoint(f"{where} is damaged: it has no weight_map.")
        for key, file in names.items():
            if not isinstance(file, str) or not _FILE.fullmatch(file):
                raise DamagedCheckpoint(
                    f"{where} is rejected: it has {key!a:.200} in {file!a:.200}, which is not "
                    "the name of a safetensors file beside it."
                )
        files = sorted(set(names.values()))
        if missing := [file for file in files if not self._has(file)]:
            raise DamagedCheckpoint(
                f"{self.where} is not complete: {_some(missing)} named by {INDEX} "
                f"{'is' if len(missing) == 1 else 'are'} missing. Download the missing files."
            )
        tensors, problems = {}, []
        for file in files:
            for key, tensor in read_header(self.storage, self.path(file)).items():
                if names.get(key) != file:
                    problems.append(f"{file} holds {key}, which is not in {INDEX}")
                tensors[key] = IndexedTensor(file, tensor)
        problems += [
            f"{file} does not hold {key}, which {INDEX} has in it"
            for key, file in names.items()
            if key not in tensors
        ]
        if problems:
            raise DamagedCheckpoint(f"{self.where} contradicts itself: {_some(problems, '; ')}.")
        return tensors


def check_counts(config: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Raise DamagedCheckpoint if the config.json in `where` has more layers or experts than the
    tensors `names` beside it: building them might not end."""
    text = config.get("text_config")
    values = text if isinstance(text, dict) else config
    for pattern, number in _COUNTS.items():
        numbers = (int(found[1]) for name in names if (found := number.search(name)))
        held = 1 + max(numbers, default=-1)
        for key in values:
            value = values[key] if fnmatchcase(key, pattern) else None
            if type(value) is int and value > held > 0:
                raise DamagedCheckpoint(
                    f"{where}/{CONFIG}: {key} is {value!r:.100}, but the weights beside it have "
                    f"{held}. Correct it, or download the folder again."
                )


def check_counts_of(folder: Path, config: Mapping[str, Any]) -> None:
    """Compare a local folder with its config.json as `check_counts` does, if it has weights that
    can be read."""
    storage, name = open_parent_storage(str(folder))
    names: Any = None
    # Damage is reported where the weights are loaded, which a run need not do.
    with suppress(CheckpointError, OSError):
        if exists(storage, f"{name}/{WEIGHTS}"):
            names = read_header(storage, f"{name}/{WEIGHTS}")
        else:
            names = _read_json(storage, f"{name}/{INDEX}").get("weight_map")
    if isinstance(names, Mapping):
        check_counts(config, names, str(folder))


def check_assets(folder: Path) -> None:
    """Raise DamagedCheckpoint if one of the assets in a folder is not JSON of an object, or not
    text, as its name says."""
    for name in _assets_in(folder):
        content = (folder / name).read_bytes()
        try:
            if name.endswith(".json") and not isinstance(json.loads(content), dict):
                raise ValueError("it is not a JSON object")
            if name.endswith((".jinja", ".txt")):
                content.decode()
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(
                f"{folder / name} is damaged: {error}. Download it again."
            ) from None


def is_hugging_face(storage: Storage, name: str) -> bool:
    """Return whether `name` is a Hugging Face folder with safetensors. Raises CheckpointError if
    its weights are in another format, or if it is a file."""
    has = {file: exists(storage, f"{name}/{file}") for file in (WEIGHTS, INDEX)}
    if any(has.values()):
        return True
    pickles = [file for file in _PICKLES if exists(storage, f"{name}/{file}")]
    if pickles:
        raise CheckpointError(
            f"{storage.root}/{name} holds its weights as {pickles[0]}, a pickle, which can run "
            'code and is not read. If you trust it, convert it with transformers: python -c "from '
            "transformers import AutoModelForCausalLM as M; M.from_pretrained('DIR', dtype='auto')"
            ".save_pretrained('OUT')\"; or take the model's safetensors."
        )
    path = local_path(f"{storage.root}/{name}")
    if path is not None and path.exists() and (problem := folder_problem(path)):
        raise CheckpointError(problem)
    return False


def read_header(storage: Storage, path: str) -> dict[str, HeaderEntry]:
    """Read the tensors in a file's header. Raises DamagedCheckpoint, with the file, if it is not a
    safetensors file or does not have the length that the header implies."""
    where = f"{storage.root}/{path}"
    try:
        length = storage.size(path)
        start = bytes(storage.read(path, 0, 8)) if length >= 8 else b""
        size = int.from_bytes(start, "little")
        if len(start) != 8 or size > min(length - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"its {length} bytes hold no header")
        table = json.loads(bytes(storage.read(path, 8, 8 + size)))
        if not isinstance(table, dict):
            raise ValueError("its header is not an object")
        table.pop("__metadata__", None)
        tensors = {name: _tensor(name, entry, 8 + size) for name, entry in table.items()}
    except OSError as error:
        raise DamagedCheckpoint(f"{where} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where} is damaged: {error}.") from None
    position = 8 + size
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].first, item[1].end)):
        if tensor.first != position:
            raise DamagedCheckpoint(
                f"{where} is damaged: {name} begins at byte {tensor.first}, and what lies before "
                f"it ends at {position}."
            )
        position = tensor.end
    if position != length:
        raise DamagedCheckpoint(
            f"{where} is damaged: by its header it has {position} bytes, but there are {length}. "
            "Download it again."
        )
    return tensors


def copy_assets(
    source: Path, target: Path, files: Files, *, also: tuple[str, ...] = ()
) -> list[str]:
    """Copy the assets that exist, durably, and return their names. Links are dereferenced."""
    files.make_folders(target)
    assets = [*_assets_in(source), *(name for name in also if (source / name).is_file())]
    for name in assets:
        files.make_folders((target / name).parent)
        files.write_file(target / name, files.read(source / name))
        files.sync_folder((target / name).parent)
    return assets


def save_assets(source: Path, root: str) -> None:
    """Copy the tokenizer files in `source` to ROOT/assets, atomically, so that the checkpoints in
    `root` are self-contained; not to object stores. A different tokenizer there is replaced, with a
    warning. A failure is only a warning, because training does not need the copy."""
    folder = local_path(root)
    if folder is None:
        return
    target = folder / ASSETS
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


def saved_assets(step_folder: str) -> Path | None:
    """Return the folder of tokenizer files that `save_assets` stored beside a step's folder."""
    step = local_path(step_folder)
    if step is None or not (step.parent / ASSETS / "tokenizer.json").is_file():
        return None
    return step.parent / ASSETS


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Encode JSON as transformers does."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _read_json(storage: Storage, path: str) -> Mapping[str, Any]:
    where = f"{storage.root}/{path}"
    try:
        values = json.loads(bytes(storage.read(path)))
    except FileNotFoundError:
        raise CheckpointError(f"{where} is missing: a Hugging Face folder requires it.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where} is damaged: {error}. Download it again.") from None
    if not isinstance(values, dict):
        raise DamagedCheckpoint(f"{where} is damaged: it is not a JSON object.")
    return values


def _some(names: list[str], between: str = ", ") -> str:
    more = f"{between}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + more


def _tensor(name: str, entry: Any, start: int) -> HeaderEntry:
    if not isinstance(entry, dict):
        raise ValueError(f"{name!a:.200} is described by {entry!r:.100}")
    dtype = DTYPES.get(str(entry.get("dtype")))
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if dtype is None or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{name!a:.200} is described by {entry!r:.200}")
    first, end = offsets
    if end - first != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!a:.200} of {shape} and {dtype} has {end - first} bytes")
    return HeaderEntry(dtype, shape, start + first, start + end)


def _sizes(values: Any) -> tuple[int, ...] | None:
    """Return None for values that are not sizes."""
    if not isinstance(values, list):
        return None
    if any(type(value) is not int or not 0 <= value < 1 << 62 for value in values):
        return None
    return tuple(values)


def _assets_in(folder: Path) -> list[str]:
    """Return the names of the assets in a folder."""
    templates = sorted(folder.glob("additional_chat_templates/*.jinja"))
    names = [*_ASSETS, *(str(file.relative_to(folder)) for file in templates)]
    return [name for name in names if (folder / name).is_file()]


def _same_files(first: Path, second: Path) -> bool:
    names = _assets_in(first)
    return names == _assets_in(second) and all(
        (first / name).read_bytes() == (second / name).read_bytes() for name in names
    )
