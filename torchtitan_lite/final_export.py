"""Export of a Hugging Face folder at the end of a run. Layer: above builders."""

from pathlib import Path

import torch

from torchtitan_lite.checkpoint import StoredSnapshot
from torchtitan_lite.checkpoint.hugging_face import (
    AdapterExport,
    HuggingFaceExport,
    TargetExists,
    check_disk_space,
)
from torchtitan_lite.checkpoint.storage import open_storage, step_name
from torchtitan_lite.config import Config
from torchtitan_lite.data.tokenizer import special_ids
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger
from torchtitan_lite.models import model_spec


def export_last_save(config: Config, root: str, tokenizer: Path) -> None:
    """Convert the newest checkpoint in `root` to `hf/step-N` in the dump folder, for
    `checkpoint.last_save_in_hf`, in `checkpoint.export_dtype`; adapters to PEFT's format.
    `tokenizer` is its folder. For one process of a run; of replicas that end together, one writes.
    Raises CheckpointError if it cannot be written."""
    storage = open_storage(root)
    step = storage.steps()[-1]
    target = Path(config.job.dump_folder).absolute() / "hf" / step_name(step)
    try:
        source, spec = StoredSnapshot(storage, step_name(step)), model_spec(config.model)
        dtype = getattr(torch, config.checkpoint.export_dtype)
        export = (
            AdapterExport(source, target, spec, config.lora, dtype=dtype, assets=tokenizer)
            if config.model.uses_lora
            else HuggingFaceExport(
                source,
                target,
                spec,
                dtype=dtype,
                assets=tokenizer,
                special_ids=special_ids(tokenizer),
            )
        )
        check_disk_space(target, export.num_bytes_left)
        export.run(num_workers=1, written=lambda count: None)
    except TargetExists as taken:
        logger.info("Step %d is not exported by this process: %s", step, taken)
    except OSError as error:
        raise CheckpointError(
            f"Step {step} is saved in {root}, but could not be exported to {target}: {error}. "
            f"Export it by torchtitan-lite convert to-hf {root}/{step_name(step)} {target}."
        ) from None
    else:
        logger.info("Exported step %d to %s", step, target)
