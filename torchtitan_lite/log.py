"""Logging for every rank. Layer: imports nothing of the project.

One logger, `torchtitan_lite`. Rank 0 logs at INFO; the other ranks log at WARNING, each line
with the rank.
"""

import logging
import os
import shutil
import sys
import textwrap
import time

logger = logging.getLogger("torchtitan_lite")


def configure_logging(level: str | None = None) -> None:
    """Attach one handler to stderr. Idempotent; `TORCHTITAN_LITE_LOG` overrides the level."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    default = "INFO" if rank == 0 else "WARNING"
    logger.setLevel(os.environ.get("TORCHTITAN_LITE_LOG") or level or default)
    logger.propagate = False
    prefix = f"[rank {rank}] " if world_size > 1 and rank > 0 else ""
    handler = logging.StreamHandler(sys.stderr)
    formatter = _Wrapping if sys.stderr.isatty() else logging.Formatter
    handler.setFormatter(formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    logger.handlers = [handler]


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


def log_once(error: Exception) -> None:
    """Log an error that occurred on every rank only once."""
    if os.environ.get("RANK", "0") == "0":
        logger.error("%s", error)
    else:
        # torchrun terminates the others as soon as one has failed: let rank 0 log first.
        time.sleep(5)
