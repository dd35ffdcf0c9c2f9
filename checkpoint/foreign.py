"""Checkpoints of other systems, told by the files they have. Layer: above storage."""

from torchtitan_lite.checkpoint.storage.manifest_json import MANIFEST
from torchtitan_lite.checkpoint.storage.storage import Storage, is_there
from torchtitan_lite.errors import CheckpointError

_DCP = ".metadata"
_HUGGING_FACE = ("model.safetensors", "model.safetensors.index.json")


def refuse_foreign(storage: Storage, folder: str) -> None:
    """Raise CheckpointError, which says what to do, where `folder` of `storage` is a checkpoint of
    torch DCP or of Hugging Face."""
    if is_there(storage, f"{folder}/{MANIFEST}"):
        return
    where = f"{storage.root}/{folder}"
    if is_there(storage, f"{folder}/{_DCP}"):
        raise CheckpointError(
            f"{where} is a torch DCP checkpoint, as torchtitan writes them. Convert it: python -m "
            f"scripts.convert_from_dcp {where} OUT_DIR --config CONFIG; then set "
            "checkpoint.initial_load_path to the step's folder in OUT_DIR."
        )
    if any(is_there(storage, f"{folder}/{name}") for name in _HUGGING_FACE):
        raise CheckpointError(
            f"{where} is a Hugging Face folder, which this version cannot load: it reads its own "
            "checkpoints (docs/checkpointing.md), and torch DCP's after python -m "
            "scripts.convert_from_dcp. Unset checkpoint.initial_load_path."
        )
