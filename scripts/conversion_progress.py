"""What the commands of conversions share: their options, a bar with MB/s, and an end by Ctrl-C or
SIGTERM that can be continued.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INTERRUPTED = 130
"""As a shell tells of SIGINT."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every conversion."""
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights that are written (default: as they are)"
    )
    parser.add_argument(
        "--workers",
        type=_positive,
        default=len(os.sched_getaffinity(0)),
        help="files that are written at a time (default: the number of cores, %(default)s)",
    )


def run_with_bar(num_bytes: int, run: Callable[[Callable[[int], None]], Any]) -> Any:
    """Run a conversion that tells of the bytes that it has written. An interrupt ends the program
    with a word on how to go on."""
    columns = (
        TextColumn("{task.description}"),
        *(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()),
    )
    with _sigterm_interrupts(), Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("writing", total=num_bytes)
        try:
            return run(lambda count: bar.advance(task, count))
        except KeyboardInterrupt:
            print("Interrupted. The same command goes on from here.", file=sys.stderr)
            sys.exit(_INTERRUPTED)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """A batch system ends jobs so; it is to be like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def local_path(text: str) -> Path:
    """A path of this machine, absolute. Raises ArgumentTypeError for a URL."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL, and a folder of this machine is needed")
    return Path(text).expanduser().absolute()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)
