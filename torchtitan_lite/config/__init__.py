"""The configuration of a run: one TOML file, overridden from the command line.

`torchtitan_lite/config/tables/` defines the tables; this package composes, reads and checks them.
`constraints.check_against` checks what depends on several tables, on the model or on the number of
processes; it and `torchtitan_file` are imported by their own names, because they import torch and
this package does not.
Layer: above every owner of a table, below the trainer. Invariant: a wrong configuration is one
ConfigError that names every problem, and nothing that the user asked for is changed on the way.
"""

from torchtitan_lite.config.compatibility import (
    check_live_resize,
    check_resize_arguments,
    config_fingerprint,
)
from torchtitan_lite.config.loading import config_from, load_config, parse_command_line
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml_file import to_toml
from torchtitan_lite.training.checks.recorded import recorded_config, to_record

__all__ = [
    "Config",
    "check_live_resize",
    "check_resize_arguments",
    "config_fingerprint",
    "config_from",
    "load_config",
    "parse_command_line",
    "recorded_config",
    "to_record",
    "to_toml",
]
