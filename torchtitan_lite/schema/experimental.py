"""The [experimental] table."""

from typing import Annotated

from torchtitan_lite.schema.job import ConfigModule
from torchtitan_lite.schema.section import Section, only


class ExperimentalConfig(Section):
    """Code of your own that is imported by name."""

    custom_import: Annotated[str, only("", "importing a module of your own")] = ""
    """Module to import at the start."""
    custom_args_module: ConfigModule = ""
    """Old name of `job.custom_config_module`."""
