"""The [job] table."""

from typing import Annotated, Literal

from torchtitan_lite.schema.section import Section, only


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
    custom_config_module: Annotated[str, only("", "a configuration module of your own")] = ""
    """Module with more sections."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on. "auto": a GPU where there is one, else the CPU."""
