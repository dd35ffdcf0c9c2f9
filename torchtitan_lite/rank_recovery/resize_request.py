"""Requests to resize a live run: a file in the run's folder, which the agent of the run answers by
another file. Layer: imports no torch, and nothing of the project."""

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

_REQUEST, _ANSWER = "resize.json", "resize_answer.json"
_MAX_BYTES = 1 << 16
_POLL_S = 0.25


class Outcome(StrEnum):
    """What became of a request."""

    ACCEPTED = "accepted"
    DONE = "done"
    """All ranks of the new mesh have committed a step."""
    REJECTED = "rejected"
    """Nothing has changed."""
    FAILED = "failed"
    """The run has returned to its former mesh."""


@dataclass(frozen=True, kw_only=True)
class ResizeRequest:
    """Another number of ranks, another mesh, or both."""

    num_ranks: int
    arguments: Sequence[str] = ()
    """Arguments of `train` that change, such as "--parallelism.tensor_parallel_degree=2"."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        return " ".join((ranks, *self.arguments))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The agent's answer to a request."""

    id: str
    outcome: Outcome
    reason: str = ""


class RequestInbox:
    """The agent's side."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the output folder of the run. What an earlier agent left there is removed."""
        self._folder = folder
        self._read_at_s = float("-inf")
        for name in (_REQUEST, _ANSWER):
            (folder / name).unlink(missing_ok=True)

    def poll(self, now_s: float) -> ResizeRequest | None:
        """Return a new request and remove its file, if there is one. A malformed file is removed
        without an answer: it is not that of `torchtitan-lite resize`."""
        if now_s < self._read_at_s + _POLL_S:
            return None
        self._read_at_s = now_s
        path = self._folder / _REQUEST
        if not path.is_file():
            return None
        content = _read(path)
        with suppress(OSError):
            path.unlink()
        match content:
            case {
                "num_ranks": int(num_ranks),
                "arguments": list(arguments),
                "id": str(key),
            } if type(num_ranks) is int and num_ranks >= 1:
                return ResizeRequest(
                    num_ranks=num_ranks, arguments=tuple(map(str, arguments)), id=key
                )
            case _:
                return None

    def answer(self, request: ResizeRequest, outcome: Outcome, reason: str = "") -> None:
        """Answer a request. A full disk or a removed folder must not end the run."""
        with suppress(OSError):
            _write(
                self._folder / _ANSWER,
                asdict(Answer(id=request.id, outcome=outcome, reason=reason)),
            )


def send_request(folder: Path, request: ResizeRequest) -> None:
    """Request a resize of the run in `folder`. Raises OSError."""
    _write(folder / _REQUEST, asdict(request))


def read_answer(folder: Path, request: ResizeRequest) -> Answer | None:
    """Return the newest answer to `request`; None if there is none yet."""
    match _read(folder / _ANSWER):
        case {"id": request.id, "outcome": str(outcome), "reason": str(reason)}:
            with suppress(ValueError):
                return Answer(id=request.id, outcome=Outcome(outcome), reason=reason)
    return None


def withdraw_request(folder: Path) -> None:
    """Remove a request that no agent has read."""
    with suppress(OSError):
        (folder / _REQUEST).unlink(missing_ok=True)


def _read(path: Path) -> Any:
    with suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        return json.loads(file.read(_MAX_BYTES))
    return None


def _write(path: Path, content: Any) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)
