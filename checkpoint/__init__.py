"""Checkpoints: save, restore, open, load and verify training state. See docs/checkpointing.md.

The names below and those of the subpackages are for the rest of the product; their modules are
internal. Names are imported when first used: the writer process imports this package and no torch.
"""

from typing import TYPE_CHECKING

from torchtitan_lite.core._links import refuse_other_name
from torchtitan_lite.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchtitan_lite.checkpoint.adapters import (
        FrozenBase,
        MergedSnapshot,
        adapted_layers,
        recorded_base,
    )
    from torchtitan_lite.checkpoint.copier import Copier
    from torchtitan_lite.checkpoint.frozen_weights import load_base, open_merged
    from torchtitan_lite.checkpoint.history.fencing_tokens import (
        FencingTokens,
        SupersededError,
        TokenClaim,
        name_in_replica_id,
        superseded_message,
    )
    from torchtitan_lite.checkpoint.history.identity import RunIdentity, run_id_in, shared_run_id
    from torchtitan_lite.checkpoint.loading import (
        load,
        load_some,
        open_snapshot,
        reject_external,
    )
    from torchtitan_lite.checkpoint.location import (
        WAYS,
        checkpoint_root,
        find_steps,
        is_step,
        newest_step,
    )
    from torchtitan_lite.checkpoint.manager import CheckpointManager
    from torchtitan_lite.checkpoint.manifest import Manifest, layouts_of, read_manifest_alone
    from torchtitan_lite.checkpoint.recorded import recorded_config, to_record
    from torchtitan_lite.checkpoint.save_context import (
        NUM_SAVE_SIGNALS,
        Checkpointable,
    )
    from torchtitan_lite.checkpoint.save_plan import SavePlan, layouts_json, plan_save
    from torchtitan_lite.checkpoint.snapshots import (
        SavedValues,
        Snapshot,
        StoredSnapshot,
        read_tensor,
    )
    from torchtitan_lite.checkpoint.tensors import (
        DTYPE_NAMES,
        DTYPES,
        copy_back,
        local_tensors,
        model_tensors,
        tensor_bytes,
        tensor_from_bytes,
    )
    from torchtitan_lite.checkpoint.verification import verify

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "NUM_SAVE_SIGNALS",
    "WAYS",
    "CheckpointManager",
    "Checkpointable",
    "Copier",
    "FencingTokens",
    "FrozenBase",
    "Manifest",
    "MergedSnapshot",
    "RunIdentity",
    "SavePlan",
    "SavedValues",
    "Snapshot",
    "StoredSnapshot",
    "SupersededError",
    "TokenClaim",
    "adapted_layers",
    "checkpoint_root",
    "copy_back",
    "find_steps",
    "is_step",
    "layouts_json",
    "layouts_of",
    "load",
    "load_base",
    "load_some",
    "local_tensors",
    "model_tensors",
    "name_in_replica_id",
    "newest_step",
    "open_merged",
    "open_snapshot",
    "plan_save",
    "read_manifest_alone",
    "read_tensor",
    "recorded_base",
    "recorded_config",
    "reject_external",
    "run_id_in",
    "shared_run_id",
    "superseded_message",
    "tensor_bytes",
    "tensor_from_bytes",
    "to_record",
    "verify",
]

_MODULES = {
    "adapters": ("FrozenBase", "MergedSnapshot", "adapted_layers", "recorded_base"),
    "copier": ("Copier",),
    "save_plan": ("SavePlan", "layouts_json", "plan_save"),
    "frozen_weights": ("load_base", "open_merged"),
    "loading": ("load", "load_some", "open_snapshot", "reject_external"),
    "history.fencing_tokens": (
        "TokenClaim",
        "FencingTokens",
        "SupersededError",
        "name_in_replica_id",
        "superseded_message",
    ),
    "history.identity": ("RunIdentity", "run_id_in", "shared_run_id"),
    "location": ("WAYS", "checkpoint_root", "find_steps", "is_step", "newest_step"),
    "manager": ("CheckpointManager",),
    "manifest": ("Manifest", "layouts_of", "read_manifest_alone"),
    "save_context": ("NUM_SAVE_SIGNALS", "Checkpointable"),
    "recorded": ("recorded_config", "to_record"),
    "snapshots": ("SavedValues", "Snapshot", "StoredSnapshot", "read_tensor"),
    "tensors": (
        "DTYPES",
        "DTYPE_NAMES",
        "copy_back",
        "local_tensors",
        "model_tensors",
        "tensor_bytes",
        "tensor_from_bytes",
    ),
    "verification": ("verify",),
}
__getattr__ = lazy_names(__name__, _MODULES)

refuse_other_name(__name__)
