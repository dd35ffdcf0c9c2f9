"""The command `torchtitan-lite`: one function per command, and one parser for all.

`parsers.py` defines the options; the module of a command is imported after its options have been
parsed successfully.
"""

import importlib
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from torchtitan_lite import __version__
from torchtitan_lite.cli.parsers import parser
from torchtitan_lite.core.errors import INTERRUPTED, TRANSIENT, ConfigError, is_transient
from torchtitan_lite.core.registry import import_module


def main(argv: Sequence[str]) -> int:
    """Run the command in `argv`. Returns the exit status."""
    try:
        if list(argv[:1]) == ["train"]:
            # All arguments except one belong to the configuration.
            from torchtitan_lite.cli.train import run_train

            return run_train(argv[1:])
        return _run_parsed(argv)
    except SystemExit as left:
        # argparse exits with 0 after --help and with 2 for an invalid command line.
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        # Raised by a user module; Python would print its message.
        print(left.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not is_transient(error):
            raise
        traceback.print_exc()
        return TRANSIENT


def _run_parsed(argv: Sequence[str]) -> int:
    own, rest = list(argv), None
    if "--" in own and own[0] == "launch":
        place = own.index("--")
        own, rest = own[:place], own[place + 1 :]
    top = parser()
    options, remaining = top.parse_known_args(own)
    if options.version:
        print(versions())
        return 0
    if options.command is None:
        top.print_help(sys.stderr)
        return 2
    if remaining and not (options.passes_on and not any(map(options.parser.meant_by, remaining))):
        after = ". Those of `train` follow --" if options.command == "launch" else ""
        options.parser.error(f"unrecognized arguments: {' '.join(remaining)}{after}")
    if options.check is not None:
        options.check(options, remaining)
    options.argv = own[1:]
    if getattr(options, "custom_import", None):
        try:
            import_module(options.custom_import, "--custom-import")
        except ConfigError as error:
            options.parser.error(str(error).rstrip("."))
    function = getattr(importlib.import_module(options.module), options.function)
    return function(options, remaining if rest is None else rest)


def versions() -> str:
    """Return the versions of this package, Python and the libraries that determine results, in
    one line."""
    parts = [f"torchtitan_lite {__version__}", f"Python {sys.version.split()[0]}"]
    for name in ("torch", "torchft"):
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"{name} not installed")
    return ", ".join(parts)
