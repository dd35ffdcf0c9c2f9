"""A torch DCP checkpoint, read one tensor at a time. Layer: above dcp_metadata.

Invariant: nothing is unpickled but tensors and plain values, by torch's own safe loader.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite.checkpoint.interchange.dcp_metadata import Place, read_contents
from torchtitan_lite.errors import DamagedCheckpoint

MODEL = "torchtitan_lite_model.json"
"""Beside the metadata: the model that was exported. torch ignores the file."""
_MOST_MODEL_BYTES = 1 << 20


class DcpFolder:
    """Raises what `read_contents` raises."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.contents = read_contents(folder)

    def exported_model(self) -> Mapping[str, Any]:
        """Family, flavor and dimensions of the model if this project wrote the folder, else
        nothing: DCP records shapes only. Raises DamagedCheckpoint if that cannot be read."""
        path = self.path / MODEL
        try:
            with path.open("rb") as file:
                values = json.loads(file.read(_MOST_MODEL_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise DamagedCheckpoint(f"{path} holds no table.")
        return values

    def tensor(self, name: str) -> torch.Tensor:
        """The whole of a tensor, put together from its chunks, contiguous, on the CPU. Raises
        DamagedCheckpoint, naming file and tensor, where a chunk is not what the metadata says."""
        about = self.contents.tensors[name]
        whole = torch.empty(about.shape, dtype=about.dtype)
        for box, place in about.boxes:
            part = self._load(name, place)
            fits = isinstance(part, torch.Tensor) and (
                part.dtype == about.dtype and tuple(part.shape) == box.size
            )
            if not fits:
                raise DamagedCheckpoint(
                    f"{self.path / place.file} is damaged: the part of {name} at {box.offset} is "
                    f"no tensor of shape {list(box.size)} and {about.dtype}."
                )
            whole[box.slices] = part.detach()
        return whole

    def value(self, name: str) -> Any:
        """Something plain that is no tensor. Raises DamagedCheckpoint where it is not plain."""
        return self._load(name, self.contents.objects[name])

    def _load(self, name: str, place: Place) -> Any:
        path = self.path / place.file
        try:
            with path.open("rb") as file:
                file.seek(place.first)
                raw = file.read(place.length)
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except Exception as error:
            # torch raises many kinds for bytes that are no zip, or hold what it does not allow.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DamagedCheckpoint(f"{path} is damaged at {name}: {reason}") from None
