"""`torchtitan-lite completion`."""

import argparse
from collections.abc import Sequence

import shtab

from torchtitan_lite.cli.parsers import PROGRAM, parser
from torchtitan_lite.config import Config
from torchtitan_lite.config.keys import all_keys


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the script. Returns the exit status."""
    top = parser()
    (commands,) = (
        action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)
    )
    train = commands["train"]
    for name, key in all_keys(Config).items():
        train.add_argument(f"--{name}", choices=key.choices or None)
    for action in train._actions:
        if "--config" in action.option_strings:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(top, shell=options.shell, root_prefix=PROGRAM.replace("-", "_")))
    return 0
