"""Parts of a replica in steps without another process: its vote, and its fence."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class StepVote:
    """The part of a manager that decides whether a step is committed: unless it was aborted."""

    _error: Exception | None = None

    def errored(self) -> Any:
        return None if self._error is None else SimpleNamespace(original_exception=self._error)

    def abort_step(self, reason: str) -> None:
        self._error = RuntimeError(reason)

    def should_commit(self) -> bool:
        return self._error is None


class RecordedFence:
    """A fence that gives `reasons` to wait, one after the other, and then admits each quorum."""

    token, is_claimed = 7, True

    def __init__(self, reasons: Sequence[str] = (), *, is_superseded: bool = False) -> None:
        self._reasons = list(reasons)
        self._is_superseded = is_superseded
        self.admitted: list[int] = []

    def admit(self, *, quorum_id: int, **unused: Any) -> str:
        self.admitted.append(quorum_id)
        return self._reasons.pop(0) if self._reasons else ""

    def is_superseded(self) -> bool:
        return self._is_superseded
