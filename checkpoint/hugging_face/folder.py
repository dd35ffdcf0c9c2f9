"""A Hugging Face folder: its config.json, and where each of its tensors lies.

Invariant: only safetensors are read, and no name in an index leads out of the folder; that a file
is a link, as in the hub's cache, is fine. Layer: above header.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.checkpoint.hugging_face.header import StoredTensor, read_header
from torchtitan_lite.checkpoint.storage.storage import Storage, is_there
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors", re.ASCII)
_SHOWN = 20


@dataclass(frozen=True)
class Found:
    """A tensor and its file."""

    file: str
    tensor: StoredTensor


class HuggingFaceFolder:
    """`name` in `storage`."""

    def __init__(self, storage: Storage, name: str) -> None:
        """Raises CheckpointError for a folder that holds something else, and DamagedCheckpoint
        where files are missing or are not what index and headers say."""
        self.storage, self.name = storage, name
        self.where = f"{storage.root}/{name}"
        self.config = read_config(storage, name)
        # As transformers does, where there are both.
        self.tensors = self._read_one(WEIGHTS) if self._has(WEIGHTS) else self._read_index()

    def path(self, file: str) -> str:
        """In the storage."""
        return f"{self.name}/{file}"

    @property
    def files(self) -> list[str]:
        """Those that hold tensors."""
        return sorted({found.file for found in self.tensors.values()})

    def _has(self, file: str) -> bool:
        return is_there(self.storage, self.path(file))

    def _read_one(self, file: str) -> dict[str, Found]:
        header = read_header(self.storage, self.path(file))
        return {key: Found(file, tensor) for key, tensor in header.items()}

    def _read_index(self) -> dict[str, Found]:
        where = f"{self.where}/{INDEX}"
        if not self._has(INDEX):
            raise CheckpointError(f"{self.where} holds neither {WEIGHTS} nor {INDEX}.")
        names = _read_json(self.storage, self.path(INDEX)).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise DamagedCheckpoint(f"{where} is damaged: it has no weight_map.")
        for key, file in names.items():
            if not isinstance(file, str) or not _FILE.fullmatch(file):
                raise DamagedCheckpoint(
                    f"{where} is refused: it has {key!a:.200} in {file!a:.200}, which is no name "
                    "of a safetensors file beside it."
                )
        files = sorted(set(names.values()))
        if missing := [file for file in files if not self._has(file)]:
            raise DamagedCheckpoint(
                f"{self.where} is not complete: {_some(missing)} named by {INDEX} "
                f"{'is' if len(missing) == 1 else 'are'} missing. Download again what is missing."
            )
        tensors, problems = {}, []
        for file in files:
            for key, tensor in read_header(self.storage, self.path(file)).items():
                if names.get(key) != file:
                    problems.append(f"{file} holds {key}, which {INDEX} has not in it")
                tensors[key] = Found(file, tensor)
        problems += [
            f"{file} does not hold {key}, which {INDEX} has in it"
            for key, file in names.items()
            if key not in tensors
        ]
        if problems:
            raise DamagedCheckpoint(f"{self.where} contradicts itself: {_some(problems, '; ')}.")
        return tensors


def read_config(storage: Storage, name: str) -> Mapping[str, Any]:
    """The config.json of a folder. Raises CheckpointError and DamagedCheckpoint."""
    return _read_json(storage, f"{name}/{CONFIG}")


def is_hugging_face(storage: Storage, name: str) -> bool:
    """Whether `name` is a Hugging Face folder with safetensors. Raises CheckpointError for one
    whose weights are pickled."""
    has = {file: is_there(storage, f"{name}/{file}") for file in (WEIGHTS, INDEX)}
    if any(has.values()):
        return True
    pickles = [file for file in _PICKLES if is_there(storage, f"{name}/{file}")]
    if pickles:
        raise CheckpointError(
            f"{storage.root}/{name} holds its weights as {pickles[0]}, a pickle, which can run "
            'code and is not read. If you trust it, convert it with transformers: python -c "from '
            "transformers import AutoModelForCausalLM as M; M.from_pretrained('DIR', dtype='auto')"
            ".save_pretrained('OUT')\"; or take the model's safetensors."
        )
    return False


def _read_json(storage: Storage, path: str) -> Mapping[str, Any]:
    where = f"{storage.root}/{path}"
    try:
        values = json.loads(bytes(storage.read(path)))
    except FileNotFoundError:
        raise CheckpointError(f"{where} is missing, which a Hugging Face folder has.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise DamagedCheckpoint(f"{where} is damaged: it holds no table.")
    return values


def _some(names: list[str], between: str = ", ") -> str:
    more = f"{between}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + more
