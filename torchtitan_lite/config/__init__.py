"""The configuration of a run: one TOML file, overridden from the command line.

`tables/` defines the tables; the modules beside it compose, read and document them. What depends on
the model, the mesh or the machine is checked in `training/checks`. Invariant: a wrong configuration
is one ConfigError that names every problem, and nothing that the user asked for is changed on the
way.
"""

from torchtitan_lite.config.fingerprint import config_fingerprint
from torchtitan_lite.config.resize import check_live_resize, check_resize_arguments
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml_file import to_toml

__all__ = [
    "Config",
    "check_live_resize",
    "check_resize_arguments",
    "config_fingerprint",
    "to_toml",
]
