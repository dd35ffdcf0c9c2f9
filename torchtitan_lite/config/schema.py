"""All sections of a configuration, and the sections that belong to no single feature.

Names and meanings are those of torchtitan 0.2.2. Layer: above every owner of a section.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator

from torchtitan_lite.anomalies import AnomaliesConfig
from torchtitan_lite.checkpoint.config import CheckpointConfig
from torchtitan_lite.config.renames import BUILT_IN_CONFIG_MODULES
from torchtitan_lite.data.config import DataConfig, ValidationConfig
from torchtitan_lite.mesh import CommConfig, ParallelismConfig
from torchtitan_lite.metrics.config import MetricsConfig, ProfilingConfig
from torchtitan_lite.models import ModelConfig
from torchtitan_lite.optim import LRSchedulerConfig, OptimizerConfig
from torchtitan_lite.parallel.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    PrecisionConfig,
    QuantizeConfig,
)
from torchtitan_lite.replica.config import FaultToleranceConfig
from torchtitan_lite.section import Section, above, at_least, only, toml_literal


def _check_config_module(name: str) -> str:
    if name and name not in BUILT_IN_CONFIG_MODULES:
        raise ValueError(
            "a configuration module of your own is not supported by this version; only "
            f"{', '.join(map(toml_literal, ('', *BUILT_IN_CONFIG_MODULES)))} are accepted, got "
            f"{toml_literal(name)}"
        )
    return name


ConfigModule = Annotated[str, AfterValidator(_check_config_module)]


class JobConfig(Section):
    """The run as a whole."""

    dump_folder: str = "./outputs"
    """Folder of everything that the run writes."""
    description: str = "default job"
    """What the run is for, in your words."""
    print_config: bool = False
    """Print the resolved configuration at the start."""
    save_config_file: str | None = None
    """Write the resolved configuration to this file too, below `job.dump_folder`."""
    custom_config_module: ConfigModule = ""
    """Module with more sections. "torchtitan.components.ft.config" is accepted and without effect,
    because its keys are part of [fault_tolerance]."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on. "auto": a GPU where there is one, else the CPU."""


class TrainingConfig(PrecisionConfig, DataConfig):
    """What to train on, for how long, and in which data types."""

    steps: Annotated[int, at_least(1)] = 10000
    """Optimizer steps to take in all; a resumed run counts those before it."""
    max_norm: Annotated[float, above(0)] = 1.0
    """Gradients are scaled down to this norm when theirs is greater."""
    gc_freq: Annotated[int, at_least(1)] = 50
    """Collect garbage every this many steps, on all ranks at once."""
    gc_debug: bool = False
    """Collect garbage in every step and report reference cycles that hold tensors; slow."""


class DebugConfig(Section):
    """Reproducibility, and aids for finding faults."""

    seed: int | None = None
    """Seed of the initial weights, the order of the samples and the random draws in forward.
    Unset means 0."""
    deterministic: bool = False
    """Use deterministic algorithms only; may be slower."""
    deterministic_warn_only: bool = False
    """With `deterministic`: warn about an operation that has no deterministic algorithm instead of
    stopping."""
    moe_force_load_balance: Annotated[bool, only(False, "forced balance of experts")] = False
    """Send every expert the same number of tokens."""
    sample_ledger: bool = False
    """Write the ids of the samples that each rank used in each committed step, as JSON lines."""
    explicit_redistribution: bool = False
    """Stop with an error that names operation and module where forward or backward redistributes
    a DTensor without being told to. Not with `compile.enable`."""
    trace_communication: bool = False
    """Write the collectives of one step and the peak memory of each module below
    `job.dump_folder`: `communication_rank_N.json` by every rank, and `communication.txt`. Not with
    `compile.enable`."""
    trace_communication_step: Annotated[int, at_least(1)] | None = None
    """Number of the step to trace. Unset: the second that this run takes, since the first allocates
    and connects, or the only one."""
    max_skipped_steps: Annotated[int, at_least(1)] = 10
    """Stop when this many steps in a row were refused for their numbers, whatever `[anomalies]`
    says of a single one."""


class MemoryEstimationConfig(Section):
    """Estimate the memory of a run without running it."""

    enable: Annotated[bool, only(False, "memory estimation")] = False
    """Estimate the memory instead of training."""
    disable_fake_mode: bool = False
    """Estimate with real tensors; without effect while switched off."""


class ExperimentalConfig(Section):
    """Code of your own that is imported by name."""

    custom_import: Annotated[str, only("", "importing a module of your own")] = ""
    """Module to import at the start."""
    custom_args_module: ConfigModule = ""
    """Old name of `job.custom_config_module`."""


class Config(Section):
    """Everything that a run is asked to do."""

    job: JobConfig = JobConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    anomalies: AnomaliesConfig = AnomaliesConfig()
    comm: CommConfig = CommConfig()
    metrics: MetricsConfig = MetricsConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    debug: DebugConfig = DebugConfig()
    memory_estimation: MemoryEstimationConfig = MemoryEstimationConfig()
    experimental: ExperimentalConfig = ExperimentalConfig()
    quantize: QuantizeConfig = QuantizeConfig()
