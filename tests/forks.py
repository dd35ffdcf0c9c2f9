"""A fork server: test processes that start in milliseconds.

Importing torch takes most of the time of a small process. The fork server imports it once, and each
process of `FORK_SERVER` is a fork of it. The server runs no other code, so no CUDA context, thread
or process group is copied.
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

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["tests.job", "torch._dynamo"])


def exit_status(function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> int | None:
    """Run `function(*args)` in a separate process and return its exit status: negative after a
    signal, None after the timeout."""
    process = FORK_SERVER.Process(target=function, args=args)
    process.start()
    process.join(timeout_s)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    return status


def run_command(*words: str, folder: Path = REPOSITORY, status: int = 0) -> str:
    """Run `torchtitan-lite WORDS` in `folder`, check the exit status, and return the output. The
    imports and the exit of an interpreter are not tested because the process is a fork."""
    with tempfile.NamedTemporaryFile("r") as output:
        actual = exit_status(_command, words, folder, output.name)
        text = output.read()
    assert actual == status, text
    return text


def send_output_to(path: str) -> None:
    """Append all further output of this process, that of C++ included, to the file at `path`."""
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _command(words: Sequence[str], folder: Path, output: str) -> None:
    send_output_to(output)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["torchtitan-lite", *words]
    sys.exit(main(words))
