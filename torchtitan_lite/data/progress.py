"""Progress of work before the first step, which takes seconds to hours.

A bar if stderr is a terminal, otherwise a log line at intervals.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchtitan_lite.core.log import logger

_LOG_INTERVAL_S = 10.0


@contextmanager
def progress(description: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `advance(num_items, num_tokens)`, which adds to the progress."""
    if sys.stderr.isatty():
        with _bar(description, unit) as advance:
            yield advance
    else:
        yield _log_lines(description, unit)


@contextmanager
def _bar(description: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn(f"{{task.fields[items]:,}} {unit}, {{task.fields[tokens]:,}} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None, items=0, tokens=0)
        done = [0, 0]

        def advance(num_items: int, num_tokens: int) -> None:
            done[0] += num_items
            done[1] += num_tokens
            bar.update(task, items=done[0], tokens=done[1])

        yield advance


def _log_lines(description: str, unit: str) -> Callable[[int, int], None]:
    logger.info("%s", description)
    done = [0, 0]
    last_time_s = time.monotonic()

    def advance(num_items: int, num_tokens: int) -> None:
        nonlocal last_time_s
        done[0] += num_items
        done[1] += num_tokens
        if time.monotonic() - last_time_s >= _LOG_INTERVAL_S:
            last_time_s = time.monotonic()
            logger.info("%s: %s %s, %s tokens", description, f"{done[0]:,}", unit, f"{done[1]:,}")

    return advance
