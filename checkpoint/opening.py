"""A folder with weights, of whatever system, as a saved state. Layer: above foreign, snapshots and
hugging_face.
"""

from torchtitan_lite.checkpoint.foreign import refuse_foreign
from torchtitan_lite.checkpoint.hugging_face.folder import is_hugging_face
from torchtitan_lite.checkpoint.hugging_face.snapshot import HuggingFaceSnapshot
from torchtitan_lite.checkpoint.snapshots import Snapshot, StoredSnapshot
from torchtitan_lite.checkpoint.storage.manifest_json import MANIFEST
from torchtitan_lite.checkpoint.storage.storage import Storage, is_there
from torchtitan_lite.spec import ModelSpec


def open_snapshot(
    storage: Storage, name: str, spec: ModelSpec | None, *, num_ranks: int = 1
) -> Snapshot:
    """The checkpoint of ours, or the Hugging Face folder of `spec`'s model, of which `num_ranks`
    ranks will each read a part.

    Raises CheckpointError for another folder, which says how to convert it, and DamagedCheckpoint
    where it is not whole.
    """
    is_ours = is_there(storage, f"{name}/{MANIFEST}")
    if spec is not None and not is_ours and is_hugging_face(storage, name):
        return HuggingFaceSnapshot(storage, name, spec, num_blocks=num_ranks)
    refuse_foreign(storage, name)
    return StoredSnapshot(storage, name)
