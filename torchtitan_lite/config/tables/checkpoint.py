"""The [checkpoint] table."""

from typing import Annotated, Literal

from torchtitan_lite.config.tables.section import Section, above, at_least, only


class CheckpointConfig(Section):
    """When and where the training state is saved, and what a run starts from."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one."""
    folder: str = "checkpoint"
    """Folder of this run's checkpoints, below `job.dump_folder`; or a URL supported by fsspec, such
    as "s3://bucket/run"."""
    interval: Annotated[int, at_least(1)] = 500
    """Steps between saves to the folder."""
    ram_interval: Annotated[int, at_least(-1)] = -1
    """Steps between snapshots in shared memory, from which a run resumes after a crash. -1: as
    often as possible at a cost of at most 3 % of a step; 0: only for saves."""
    snapshot_gib: Annotated[float, at_least(0)] = 0.0
    """Maximum shared memory per rank (GiB); a rank needs three times its state, and with less
    training waits while a checkpoint is written. With `buddy_interval`, about seven times. 0: no
    limit."""
    buddy_interval: Annotated[int, at_least(0)] = 0
    """Steps between copies of the snapshots in the memory of another machine, from which a run
    resumes after the loss of a machine. A copy takes a snapshot if none is due. 0: none."""
    buddy_mib_per_s: Annotated[float, at_least(1)] = 256.0
    """Maximum rate at which a rank's snapshot is copied to another machine (MiB/s)."""
    enable_first_step_checkpoint: bool = True
    """Save after the first step too, so that a failing storage is found early."""
    keep_latest_k: Annotated[int, at_least(0)] = 10
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_every: Annotated[int, at_least(0)] = 0
    """Also keep checkpoints of multiples of this step, which do not count; 0: none."""
    preemption_grace_s: Annotated[float, above(0)] = 30.0
    """Time that the background writer may outlive a killed trainer, to write its newest snapshot
    (seconds)."""
    writer_nice: Annotated[int, at_least(0)] = 10
    """Niceness of the background writer, as of nice(1)."""
    writer_mib_per_s: Annotated[float, at_least(0)] = 0.0
    """Maximum write rate of a rank's background writer (MiB/s); 0: no limit."""
    load_step: int = -1
    """Step to resume from. -1: the newest complete checkpoint."""
    initial_load_path: str | None = None
    """Checkpoint of another run to start from (".../step-1000"), or a Hugging Face folder; used if
    this run has no checkpoint of its own."""
    initial_load_model_only: bool = True
    """Load only the weights of `initial_load_path`, and start at step 0."""
    initial_load_in_hf: bool = False
    """Without `initial_load_path`: start from the weights in `model.hf_assets_path`. With it: it
    must be a Hugging Face folder. By default, its format is detected."""
    initial_load_in_hf_quantized: Annotated[
        bool, only(False, "loading quantized Hugging Face weights")
    ] = False
    """The Hugging Face weights are quantized."""
    load_only: bool = False
    """Load, but do not save."""
    last_save_model_only: bool = False
    """Save only the weights after the last step. False here (torchtitan: true), because a run whose
    `training.steps` is raised later must resume."""
    last_save_in_hf: bool = False
    """After the last step, also export the weights as a Hugging Face folder, `hf/step-N` below
    `job.dump_folder`."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Data type of the weights in a last save with `last_save_model_only`, and of
    `last_save_in_hf`."""
    export_file_gb: Annotated[float, above(0)] = 5.0
    """Maximum size of a safetensors file of `last_save_in_hf` (GB); a larger tensor has its own
    file. The ranks write different files, so that at most as many ranks write as there are."""
    exclude_from_loading: list[
        Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng"]
    ] = []
    """Parts of the state not to load. The learning rate schedule is never loaded: it follows the
    config."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    """"async": save in the background, from shared memory (torchtitan's default: "disabled").
    "async_with_pinned_mem": the same, because memory that a GPU copies to is always pinned.
    "disabled": training waits until a save is written."""
    enable_ft_dataloader_checkpoints: Annotated[
        bool, only(True, "a checkpoint of replicas without the position in the data")
    ] = True
    """Only true is accepted: the position in the data is part of every checkpoint."""
    create_seed_checkpoint: Annotated[bool, only(False, "a seed checkpoint")] = False
    """Not needed: initial weights are the same on every mesh."""
