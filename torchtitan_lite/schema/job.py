"""The [job] table."""

from typing import Annotated, Literal

from pydantic import AfterValidator

from torchtitan_lite.schema.section import Section, toml_literal

BUILT_IN_CONFIG_MODULES = ("torchtitan.components.ft.config",)
"""Configuration modules of torchtitan whose keys are part of this schema. Naming one has no effect
and imports nothing."""


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
