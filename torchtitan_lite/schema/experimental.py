"""The [experimental] table."""

from typing import Annotated

from torchtitan_lite.schema.section import Section, only


class ExperimentalConfig(Section):
    """Code of your own that is imported by name."""

    custom_import: Annotated[str, only("", "importing a module of your own")] = ""
    """Module to import at the start."""
    custom_args_module: Annotated[str, only("", "a configuration module of your own")] = ""
    """Old name of `job.custom_config_module`."""
