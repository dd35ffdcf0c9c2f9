"""Threads that share out the files of a conversion. Layer: imports storage only.

Reading, checksums, casts and writing all run without Python's lock, so that threads are enough.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from torchtitan_lite.checkpoint.storage.part_file import Abandoned

_T = TypeVar("_T")
Tick = Callable[[], None]
"""Called often by a worker; it raises Abandoned when the work is not wanted any more."""


def share_out(tasks: Sequence[_T], work: Callable[[_T, Tick], None], *, num_workers: int) -> None:
    """Run `work` for every task, `num_workers` at a time. Raises the first error, also that of an
    interrupt, once all workers have stopped; tasks that were not begun are left out."""
    stop = threading.Event()

    def tick() -> None:
        if stop.is_set():
            raise Abandoned

    def run(task: _T) -> None:
        tick()
        work(task, tick)

    with ThreadPoolExecutor(num_workers, "conversion") as pool:
        running = [pool.submit(run, task) for task in tasks]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            error = next((error for one in done if (error := one.exception())), None)
        finally:
            # An interrupt comes here too; the pool then waits for its threads.
            stop.set()
    if error is not None:
        raise error
