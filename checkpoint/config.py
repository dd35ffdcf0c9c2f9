"""The [checkpoint] section. Layer: imports section only."""

from typing import Annotated, Literal

from torchtitan_lite.section import Section, at_least, only


class CheckpointConfig(Section):
    """When the training state is saved, where, and what a run starts from."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one."""
    folder: str = "checkpoint"
    """Folder of this run's checkpoints, below `job.dump_folder`."""
    interval: Annotated[int, at_least(1)] = 500
    """Steps between two saves."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step too, so that a storage that does not work shows early."""
    keep_latest_k: Annotated[int, at_least(0)] = 10
    """Keep this many newest checkpoints and delete older ones; 0 keeps all."""
    load_step: int = -1
    """Resume from this step. -1: from the newest checkpoint that is whole."""
    initial_load_path: str | None = None
    """Checkpoint of another run to start from (".../step-1000"), used when this run has none of
    its own."""
    initial_load_model_only: bool = True
    """Of `initial_load_path` take the weights only, and start at step 0."""
    initial_load_in_hf: Annotated[bool, only(False, "loading a Hugging Face folder")] = False
    """`initial_load_path` is a Hugging Face folder."""
    initial_load_in_hf_quantized: Annotated[
        bool, only(False, "loading quantized Hugging Face weights")
    ] = False
    """The Hugging Face weights are quantized."""
    load_only: bool = False
    """Load, and save nothing."""
    last_save_model_only: bool = False
    """Save only the weights after the last step. False here (torchtitan: true), since a run whose
    `training.steps` is raised later must resume."""
    last_save_in_hf: Annotated[bool, only(False, "saving in Hugging Face's format")] = False
    """Write the last save as a Hugging Face folder."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Data type of the weights in a last save with `last_save_model_only`."""
    exclude_from_loading: list[
        Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng"]
    ] = []
    """Parts of the state that are not loaded. The learning rate's schedule is never loaded: it is
    that of the config."""
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"],
        only("disabled", "asynchronous saving"),
    ] = "disabled"
    """"disabled": training waits until the save is on disk."""
    enable_ft_dataloader_checkpoints: bool = True
    """Accepted for compatibility: the data position is always part of a checkpoint."""
    create_seed_checkpoint: Annotated[bool, only(False, "a seed checkpoint")] = False
    """Not needed: initial weights are the same on every mesh."""
