"""Raise errors on all ranks together, so that no rank waits for another in the next collective."""

import traceback
from collections.abc import Callable
from typing import TypeVar, cast

from torchtitan_lite.checkpoint.storage.base import is_permanent
from torchtitan_lite.errors import CheckpointError, DamagedCheckpoint, UserError
from torchtitan_lite.host_collectives import all_gather_bytes
from torchtitan_lite.log import logger

_T = TypeVar("_T")


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


def first_message(text: str) -> str:
    """Return the message of the first rank that has one; "" if none has. Every rank must call
    it."""
    return next((reports.decode() for reports in all_gather_bytes(text.encode()) if reports), "")
