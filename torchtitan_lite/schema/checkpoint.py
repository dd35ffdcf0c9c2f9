"""The [checkpoint] table."""

from typing import Annotated, Literal

from torchtitan_lite.schema.section import Section, above, at_least, only


class CheckpointConfig(Section):
    """When the training state is saved, where, and what a run starts from."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one."""
    folder: str = "checkpoint"
    """Folder of this run's checkpoints, below `job.dump_folder`; or a URL that fsspec knows, such
    as "s3://bucket/run"."""
    interval: Annotated[int, at_least(1)] = 500
    """Steps between two saves to the folder."""
    ram_interval: Annotated[int, at_least(-1)] = -1
    """Steps between two snapshots in shared memory, from which a run resumes after a crash. -1: as
    few as cost at most 3 % of a step; 0: only where a save needs one."""
    snapshot_gib: Annotated[float, at_least(0)] = 0.0
    """The most shared memory of a rank (GiB), which needs three times its state; with less,
    training waits while a checkpoint is written. 0: what there is."""
    enable_first_step_checkpoint: bool = True
    """Save after the first step too, so that a storage that does not work shows early."""
    keep_latest_k: Annotated[int, at_least(0)] = 10
    """Keep this many newest checkpoints and delete older ones; 0 keeps all."""
    keep_every: Annotated[int, at_least(0)] = 0
    """Checkpoints of steps that this divides stay too, and are not counted; 0: none."""
    preemption_grace_s: Annotated[float, above(0)] = 30.0
    """How long the writer may outlive a trainer that was killed, to write its newest snapshot
    (seconds). What is not written by then is cut off."""
    writer_nice: Annotated[int, at_least(0)] = 10
    """By how much the background writer gives way to training, as nice(1) counts."""
    writer_mib_per_s: Annotated[float, at_least(0)] = 0.0
    """The most that a rank's background writer writes in a second (MiB); 0: no limit."""
    load_step: int = -1
    """Resume from this step. -1: from the newest checkpoint that is whole."""
    initial_load_path: str | None = None
    """Checkpoint of another run to start from (".../step-1000"), or a Hugging Face folder; used
    when this run has no checkpoint of its own."""
    initial_load_model_only: bool = True
    """Of `initial_load_path` take the weights only, and start at step 0."""
    initial_load_in_hf: bool = False
    """Accepted for compatibility: what `initial_load_path` is, is told by its files."""
    initial_load_in_hf_quantized: Annotated[
        bool, only(False, "loading quantized Hugging Face weights")
    ] = False
    """The Hugging Face weights are quantized."""
    load_only: bool = False
    """Load, and save nothing."""
    last_save_model_only: bool = False
    """Save only the weights after the last step. False here (torchtitan: true), since a run whose
    `training.steps` is raised later must resume."""
    last_save_in_hf: bool = False
    """After the last step, also write the weights as a Hugging Face folder, `hf/step-N` below
    `job.dump_folder`."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Data type of the weights in a last save with `last_save_model_only`, and in that of
    `last_save_in_hf`."""
    exclude_from_loading: list[
        Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng"]
    ] = []
    """Parts of the state that are not loaded. The learning rate's schedule is never loaded: it is
    that of the config."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """"async": saves run beside training, from shared memory (torchtitan's default: "disabled").
    "async_with_pinned_mem": the same, since memory that a GPU copies to is always pinned.
    "disabled": training waits until a save is written."""
    enable_ft_dataloader_checkpoints: bool = True
    """Accepted for compatibility: the data position is always part of a checkpoint."""
    create_seed_checkpoint: Annotated[bool, only(False, "a seed checkpoint")] = False
    """Not needed: initial weights are the same on every mesh."""
