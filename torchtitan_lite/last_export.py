"""The Hugging Face folder that a run may leave at its end. Layer: beside build."""

from pathlib import Path

import torch

from torchtitan_lite.checkpoint.hugging_face.to_hf import ToHuggingFace
from torchtitan_lite.checkpoint.snapshots import StoredSnapshot
from torchtitan_lite.checkpoint.storage.names import step_name
from torchtitan_lite.checkpoint.storage.storage import open_storage
from torchtitan_lite.config import Config
from torchtitan_lite.log import logger
from torchtitan_lite.models import model_spec


def export_last_save(config: Config, root: str, assets: Path | None) -> None:
    """Convert the newest checkpoint in `root` into `hf/step-N` of the dump folder, as
    `checkpoint.last_save_in_hf` asks for, in the dtype of `checkpoint.export_dtype`. `assets` has
    the files of the tokenizer. For one process of a run, when nobody waits for it.

    Raises what `ToHuggingFace` does; where replicas come here together, one of them writes.
    """
    storage = open_storage(root)
    step = storage.steps()[-1]
    target = Path(config.job.dump_folder).absolute() / "hf" / step_name(step)
    if target.exists():
        logger.info("%s is there already, and stays.", target)
        return
    export = ToHuggingFace(
        StoredSnapshot(storage, step_name(step)),
        target,
        model_spec(config.model),
        dtype=getattr(torch, config.checkpoint.export_dtype),
        assets=assets,
    )
    export.run(num_workers=1, written=lambda count: None)
    logger.info("Exported step %d to %s", step, target)
