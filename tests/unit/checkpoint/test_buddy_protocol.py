"""Copies on other machines as the copying process sees them."""

import time
from types import SimpleNamespace
from typing import Any

from torchtitan_lite.checkpoint.buddies import BuddyCopies


def _copies() -> Any:
    copies: Any = object.__new__(BuddyCopies)
    copies.cancels = 0

    def cancel() -> None:
        copies.cancels += 1

    copies.process = SimpleNamespace(cancel=cancel, settings=SimpleNamespace(address="a:1"))
    copies._context = SimpleNamespace(mesh=SimpleNamespace(rank=0, is_leader=True))
    copies._copy, copies._begun_at, copies._kept = None, None, None
    copies._events, copies._failing_since_s = [], None
    return copies


def _copy(*sources: int) -> Any:
    return SimpleNamespace(
        pid=7, order=SimpleNamespace(number=3), missing=set(sources), progress_s={}, error=""
    )


def test_an_outage_is_reported_as_over_once() -> None:
    copies = _copies()
    copies._failing_since_s = time.monotonic()
    for _ in range(2):
        copies._report_success(4)
    assert [event.name for event in copies._events] == ["buddy_copies_recovered"]


def test_a_copy_is_cancelled_once() -> None:
    copies = _copies()
    copies._copy = _copy(1)
    for _ in range(2):
        copies.cancel()
    assert copies.cancels == 1


def test_a_resume_keeps_no_copy_but_that_of_its_step() -> None:
    copies = _copies()
    copies._begun_at, copies._kept = object(), object()
    copies.resume_from(None, None)
    assert copies._begun_at is None and copies._kept is None


def test_a_copy_is_complete_once_all_sources_are_received() -> None:
    copies = _copies()
    copies._copy = copy = _copy(1, 2)
    for number, source, missing in ((2, 1, {1, 2}), (3, 1, {2}), (3, 2, set())):
        copies._handle({"received": number, "source": source})
        assert copy.missing == missing
