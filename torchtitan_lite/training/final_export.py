"""Export of a Hugging Face folder at the end of a run."""

from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.checkpoint import StoredSnapshot
from torchtitan_lite.checkpoint.convert.hugging_face import (
    AdapterExport,
    FolderExport,
    HuggingFaceExport,
    TargetExists,
    export_on_all_ranks,
)
from torchtitan_lite.checkpoint.storage import open_storage, step_name
from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.core.log import logger
from torchtitan_lite.data.tokenizer import special_ids
from torchtitan_lite.distributed.host_collectives import all_gather_ints
from torchtitan_lite.distributed.on_all_ranks import run_on_all_ranks
from torchtitan_lite.models import model_spec


def export_last_save(config: Config, root: str, tokenizer: Path) -> None:
    """Convert the newest checkpoint in `root` to `hf/step-N` in the dump folder, for
    `checkpoint.last_save_in_hf`, in `checkpoint.export_dtype`; adapters to PEFT's format.
    `tokenizer` is its folder. The ranks of a run write it together, and of replicas that end
    together, one writes. Every rank must call it. Raises CheckpointError on all ranks if it cannot
    be written."""
    storage = open_storage(root)
    is_leader = dist.get_rank() == 0
    newest = run_on_all_ranks(lambda: storage.steps()[-1] if is_leader else 0)
    step = all_gather_ints(newest)[0]
    target = Path(config.job.dump_folder).absolute() / "hf" / step_name(step)

    def prepare() -> FolderExport:
        source, spec = StoredSnapshot(storage, step_name(step)), model_spec(config.model)
        dtype = getattr(torch, config.checkpoint.export_dtype)
        if config.model.uses_lora:
            return AdapterExport(source, target, spec, config.lora, dtype=dtype, assets=tokenizer)
        return HuggingFaceExport(
            source,
            target,
            spec,
            dtype=dtype,
            max_shard_bytes=round(config.checkpoint.export_file_gb * 1e9),
            assets=tokenizer,
            special_ids=special_ids(tokenizer),
        )

    try:
        export_on_all_ranks(prepare)
    except TargetExists as taken:
        logger.info("Step %d is not exported by this process: %s", step, taken)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"Step {step} is saved in {root}, but could not be exported to {target}: "
            f"{str(error).rstrip('.')}. Export it by torchtitan-lite convert to-hf "
            f"{root}/{step_name(step)} {target}."
        ) from None
    else:
        logger.info("Exported step %d to %s", step, target)
