"""Commands for users to copy, in the form that works in this environment."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_STEPS = "--training.steps"


def torchtitan_lite() -> list[str]:
    """Return the words that call `torchtitan-lite`: by name if it is installed, otherwise as a
    module."""
    name = "torchtitan-lite"
    if shutil.which(name) or Path(sys.executable).with_name(name).exists():
        return [program(name)]
    return [program("python"), "-m", "torchtitan_lite"]


def program(name: str) -> str:
    """Return the path of a program of this environment, which may not be on the PATH."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(beside) or not beside.exists():
        return name
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def with_steps(arguments: Sequence[str], steps: int) -> list[str]:
    """Return the arguments of `train` with another number of steps."""
    kept = [argument for argument in arguments if not argument.startswith(f"{_STEPS}=")]
    if _STEPS in kept:
        place = kept.index(_STEPS)
        del kept[place : place + 2]
    return [*kept, _STEPS, str(steps)]
