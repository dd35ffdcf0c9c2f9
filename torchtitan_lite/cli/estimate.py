"""`torchtitan-lite estimate`, and `memory_estimation.enable` in `train`."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite.config import Config
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.log import configure_logging, log_error_on_rank_0
from torchtitan_lite.training.run_config import parse_command_line

_DEFAULT_DEVICE = "h200"


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the estimate. Returns 0, or 1 if the step does not fit the device."""
    configure_logging()
    try:
        config, _ = parse_command_line(["--config", str(options.config), *arguments])
        return print_estimate(
            config,
            options.world_size,
            device=options.device,
            whole=options.all_layers,
            search=options.search,
            picture=options.memory_plot,
            values=options.json,
        )
    except (UserError, OSError) as error:
        log_error_on_rank_0(error) if isinstance(error, UserError) else print(error)
        return 2


def print_estimate(
    config: Config,
    world_size: int,
    *,
    device: str = _DEFAULT_DEVICE,
    whole: bool = False,
    search: bool = True,
    picture: Path | None = None,
    values: Path | None = None,
) -> int:
    """Print the estimate of `config`, and write its picture and its values, if given. Returns 0, or
    1 if the step does not fit the device."""
    # Imported once the configuration is known to be right, so that a typo fails fast.
    from torchtitan_lite.tools.estimate import as_values, estimate, memory_picture, text

    result = estimate(config, world_size, device, extrapolate=not whole, search=search)
    print(text(result), end="")
    if picture is not None:
        picture.write_text(memory_picture(result), encoding="utf-8")
        print(f"\nWrote {picture}")
    if values is not None:
        values.write_text(json.dumps(as_values(result), indent=1) + "\n", encoding="utf-8")
    return 1 if result.fits is False else 0


def estimate_instead(config: Config) -> int:
    """Print the estimate on rank 0 in place of the run that the environment describes. Returns the
    exit status."""
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    return print_estimate(config, int(os.environ.get("WORLD_SIZE", "1")))
