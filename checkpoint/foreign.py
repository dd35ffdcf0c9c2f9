"""Checkpoints of other systems, told by the files they have. Layer: above storage."""

from torchtitan_lite.checkpoint.hugging_face.folder import is_hugging_face
from torchtitan_lite.checkpoint.storage.manifest_json import MANIFEST
from torchtitan_lite.checkpoint.storage.storage import Storage, is_there
from torchtitan_lite.errors import CheckpointError

_DCP = ".metadata"


def refuse_foreign(storage: Storage, folder: str) -> None:
    """Raise CheckpointError, which says what to do, where `folder` of `storage` is a checkpoint of
    torch DCP, or a Hugging Face folder where a checkpoint of ours is needed."""
    if is_there(storage, f"{folder}/{MANIFEST}"):
        return
    where = f"{storage.root}/{folder}"
    if is_there(storage, f"{folder}/{_DCP}"):
        raise CheckpointError(
            f"{where} is a torch DCP checkpoint, as torchtitan writes them. Convert it: "
            f"torchtitan-lite convert from-dcp {where} OUT_DIR --config CONFIG; then set "
            "checkpoint.initial_load_path to the step's folder in OUT_DIR."
        )
    if is_hugging_face(storage, folder):
        raise CheckpointError(
            f"{where} is a Hugging Face folder, and a checkpoint of torchtitan_lite is needed. "
            f"Convert it: torchtitan-lite convert from-hf {where} OUT_DIR."
        )
