"""The configuration of a run: one TOML file, overridden from the command line.

Each owner of a feature defines its section beside its code; this package composes them, reads
them, and checks what depends on several of them. Layer: above every owner of a section, below
the trainer. Invariant: a wrong configuration is one ConfigError that names every problem, and
nothing that the user asked for is changed on the way.
"""

from torchtitan_lite.config.command_line import parse_command_line
from torchtitan_lite.config.constraints import (
    check_against,
    check_pipeline,
)
from torchtitan_lite.config.likeness import likeness
from torchtitan_lite.config.loading import config_from, load_config
from torchtitan_lite.config.mesh_constraints import pipeline_microbatches
from torchtitan_lite.config.recorded import recorded_config
from torchtitan_lite.config.schema import (
    Config,
    DebugConfig,
    ExperimentalConfig,
    JobConfig,
    MemoryEstimationConfig,
    TrainingConfig,
)
from torchtitan_lite.config.toml_file import read_toml, to_toml
from torchtitan_lite.config.torchtitan_file import differing_defaults, is_torchtitan_file

__all__ = [
    "Config",
    "DebugConfig",
    "ExperimentalConfig",
    "JobConfig",
    "MemoryEstimationConfig",
    "TrainingConfig",
    "check_against",
    "check_pipeline",
    "config_from",
    "differing_defaults",
    "is_torchtitan_file",
    "likeness",
    "load_config",
    "parse_command_line",
    "pipeline_microbatches",
    "read_toml",
    "recorded_config",
    "to_toml",
]
