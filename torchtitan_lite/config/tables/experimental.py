"""The [experimental] table."""

from torchtitan_lite.config.tables.section import Section


class ExperimentalConfig(Section):
    """User modules imported by name, see docs/extending.md."""

    custom_import: str = ""
    """Module to import before the configuration is checked. It registers model families, data sets,
    losses, optimizers, hooks, metrics sinks and storages."""
    custom_args_module: str = ""
    """Old name of `job.custom_config_module`."""
