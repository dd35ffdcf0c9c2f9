"""Raise errors on all ranks together, so that no rank waits for another in the next collective."""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar, cast

from torchtitan_lite.core.errors import (
    CheckpointError,
    DamagedCheckpoint,
    UserError,
    WriteAbandoned,
    is_permanent,
)
from torchtitan_lite.core.log import logger
from torchtitan_lite.distributed.host_collectives import all_gather_bytes, all_gather_ints

_T = TypeVar("_T")
_POLL_S = 0.1
_RUNNING, _DONE, _FAILED = range(3)


def raise_on_all_ranks(error: BaseException | None) -> None:
    """Raise the errors of any rank on all ranks: DamagedCheckpoint if all are permanent storage
    errors, CheckpointError otherwise. Every rank must call it."""
    report = ""
    if error is not None:
        if isinstance(error, (UserError, OSError)):
            text = str(error)
        else:
            text = f"unexpected {error!r}"
            logger.error("%s", "".join(traceback.format_exception(error)))
        report = f"{'damage' if is_permanent(error) else 'misfit'} {text}"
    reports = [text.decode().partition(" ") for text in all_gather_bytes(report.encode()) if text]
    if not reports:
        return
    # Other errors take precedence, because they would recur with another checkpoint.
    others = {message for kind, _, message in reports if kind != "damage"}
    kind = CheckpointError if others else DamagedCheckpoint
    raise kind(" ".join(sorted(others or {message for _, _, message in reports}))) from error


def run_on_all_ranks(action: Callable[[], _T]) -> _T:
    """Run `action`, which contains no collective, and return its result. Raises the errors of any
    rank on all ranks, as `raise_on_all_ranks` does. Every rank must call it."""
    result, error = None, None
    try:
        result = action()
    except (UserError, OSError) as caught:
        error = caught
    raise_on_all_ranks(error)
    return cast(_T, result)


def run_long_on_all_ranks(action: Callable[[Callable[[], None]], _T]) -> _T:
    """Run `action` as `run_on_all_ranks` does, however long it takes on any rank, and whatever it
    raises. It receives a tick, which raises WriteAbandoned once another rank has failed. Every rank
    must call it.

    It runs in a thread, and meanwhile the ranks exchange their states, so that no collective times
    out. The loss of a rank raises as in any collective, after `action` has stopped here.
    """
    stop = threading.Event()

    def tick() -> None:
        if stop.is_set():
            raise WriteAbandoned

    states = [_RUNNING]
    with ThreadPoolExecutor(1, "all-ranks") as pool:
        running = pool.submit(action, tick)
        try:
            while _RUNNING in states and _FAILED not in states:
                wait([running], _POLL_S)
                states = all_gather_ints(_state(running))
        finally:
            stop.set()
    error = running.exception()
    raise_on_all_ranks(None if isinstance(error, WriteAbandoned) else error)
    return running.result()


def _state(running: Future[_T]) -> int:
    if not running.done():
        return _RUNNING
    return _DONE if running.exception() is None else _FAILED


def first_message(text: str) -> str:
    """Return the message of the first rank that has one; "" if none has. Every rank must call
    it."""
    return next((reports.decode() for reports in all_gather_bytes(text.encode()) if reports), "")
