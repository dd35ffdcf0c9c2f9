"""The [job] table."""

from typing import Literal

from torchtitan_lite.config.tables.section import Section

BUILT_IN_CONFIG_MODULES = ("torchtitan.components.ft.config",)
"""Configuration modules of torchtitan whose keys are part of this schema. Naming one imports
nothing."""


CONFIG_MODULE_KEYS = (("job", "custom_config_module"), ("experimental", "custom_args_module"))
"""Keys that name a module with user-defined tables and keys."""


class JobConfig(Section):
    """General settings of the run."""

    dump_folder: str = "./outputs"
    """Folder of all outputs of the run."""
    when_in_use: Literal["refuse", "wait"] = "refuse"
    """If another run uses `dump_folder`: end with an error that names it, or wait for its end."""
    description: str = "default job"
    """Description of the run."""
    print_config: bool = False
    """Print the resolved configuration at the start."""
    save_config_file: str | None = None
    """Write the resolved configuration to this file too, below `job.dump_folder`."""
    custom_config_module: str = ""
    """Module whose class `JobConfig` adds tables and keys, see docs/extending.md.
    "torchtitan.components.ft.config" is accepted and without effect, because its keys are part of
    [fault_tolerance]."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device. "auto": a GPU if there is one, else the CPU."""
