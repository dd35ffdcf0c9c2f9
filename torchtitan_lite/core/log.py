"""Logging for every rank.

One logger, `torchtitan_lite`. Rank 0 logs at INFO; the other ranks log at WARNING, each line with
the rank. A line has the time and the level.
"""

import logging
import os
import shutil
import sys
import textwrap
import time
import warnings
from typing import TextIO

logger = logging.getLogger("torchtitan_lite")


def configure_logging(level: str | None = None, *, beside_steps: bool = False) -> None:
    """Log to stderr or, `beside_steps`, to stdout, where the steps of a run are printed, and errors
    to stderr. Idempotent; `TORCHTITAN_LITE_LOG` overrides the level."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    default = "INFO" if rank == 0 else "WARNING"
    logger.setLevel(os.environ.get("TORCHTITAN_LITE_LOG") or level or default)
    logger.propagate = False
    prefix = f"[rank {rank}] " if world_size > 1 and rank > 0 else ""
    logger.handlers = [_handler(sys.stderr, prefix)]
    if beside_steps:
        logger.handlers[0].setLevel(logging.ERROR)
        logger.addHandler(_handler(sys.stdout, prefix))
        logger.handlers[1].addFilter(lambda record: record.levelno < logging.ERROR)
    if rank > 0 and not sys.warnoptions:
        # Deprecations depend on the code alone, so that rank 0 shows the same ones. Others may
        # concern the data, stage, device or machine of this rank: each is shown once.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("once", UserWarning)
        warnings.simplefilter("once", RuntimeWarning)


def _handler(stream: TextIO, prefix: str) -> logging.StreamHandler[TextIO]:
    handler = logging.StreamHandler(stream)
    formatter = _Wrapping if stream.isatty() else logging.Formatter
    handler.setFormatter(formatter(f"%(asctime)s %(levelname)s {prefix}%(message)s", "%H:%M:%S"))
    return handler


class _Wrapping(logging.Formatter):
    """Formatter that wraps long lines for a terminal; a file keeps one line per message."""

    def format(self, record: logging.LogRecord) -> str:
        width = shutil.get_terminal_size().columns
        return "\n".join(wrapped(line, width) for line in super().format(record).splitlines())


def is_live_terminal() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def wrapped(line: str, width: int) -> str:
    """Wrap a line between words, with indented continuation. A word longer than the terminal is
    kept, so that paths and commands can be copied."""
    if len(line) <= width:
        return line
    return textwrap.fill(
        line,
        width,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def warn_on_rank_0(message: str, *values: object) -> None:
    """Log a warning that all ranks of a run reach, on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        # The line of the caller.
        logger.warning(message, *values, stacklevel=2)


def log_error_on_rank_0(error: Exception) -> None:
    """Log an error that occurred on every rank, on rank 0 alone. The others wait 5 s."""
    if os.environ.get("RANK", "0") == "0":
        logger.error("%s", error)
    else:
        # torchrun terminates the others as soon as one has failed: let rank 0 log first.
        time.sleep(5)
