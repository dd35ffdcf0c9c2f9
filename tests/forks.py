"""Processes for tests that start in milliseconds.

Importing torch takes most of the time of a small process, so one process imports it once, and each
process of `FORKS` is a fork of that one. Its own code has not run before the fork: no CUDA context,
no thread and no process group is copied.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.launch import REPOSITORY
from torchtitan_lite.cli import main

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.job", "torch._dynamo"])


def exit_status(function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> int | None:
    """Run `function(*args)` in a process of its own. Returns its exit status, negative for a
    signal; None if it did not end in time."""
    process = FORKS.Process(target=function, args=args)
    process.start()
    process.join(timeout_s)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    return status


def run_command(*words: str, folder: Path = REPOSITORY, status: int = 0) -> str:
    """Run `torchtitan-lite WORDS` in `folder`, check the exit status, and return the output. What a
    start imports, and how an interpreter ends, is not tested so."""
    with tempfile.NamedTemporaryFile("r") as output:
        given = exit_status(_command, words, folder, output.name)
        text = output.read()
    assert given == status, text
    return text


def send_output_to(path: str) -> None:
    """Append what this process prints from now on to the file at `path`, output of C++ included."""
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _command(words: Sequence[str], folder: Path, output: str) -> None:
    send_output_to(output)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["torchtitan-lite", *words]
    sys.exit(main(words))
