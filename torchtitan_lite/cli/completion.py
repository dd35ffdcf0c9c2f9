"""`torchtitan-lite completion`."""

import argparse
from collections.abc import Sequence
from typing import Literal, get_args, get_origin

import shtab

from torchtitan_lite.cli.parsers import PROGRAM, parser
from torchtitan_lite.config import Config
from torchtitan_lite.config.keys import all_keys, split_none


def run(options: argparse.Namespace, others: Sequence[str]) -> int:
    """Print the script. Returns the exit status."""
    top = parser()
    (commands,) = (
        action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)
    )
    train = commands["train"]
    for name, key in all_keys(Config).items():
        kind, _ = split_none(key.type)
        choices = get_args(kind) if get_origin(kind) is Literal else None
        choices = ("true", "false") if kind is bool else choices
        train.add_argument(f"--{name}", choices=choices)
    for action in train._actions:
        if "--config" in action.option_strings:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
    print(shtab.complete(top, shell=options.shell, root_prefix=PROGRAM.replace("-", "_")))
    return 0
