"""Requests to resize a live run: a file in the run's folder, which the run answers by another file.
On several machines, the first one that finds it passes it on to the coordinator."""

import json
import secrets
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

_REQUEST, _ANSWER = "resize.json", "resize_answer.json"
_MAX_BYTES = 1 << 16
_MAX_ID_CHARS = 64
_PROCESS = secrets.token_hex(8)
_POLL_S = 0.25
ACCEPT_S = 20.0
"""Time for an agent to answer a request, which a recovery may delay."""
LEAVE_S = 120.0
"""Time for the step after which all ranks leave their training."""


class ResizeState(StrEnum):
    """State of a request."""

    ACCEPTED = "accepted"
    READY = "ready"
    """New processes are warm, so that the ranks may leave the training when all others are, too."""
    LEFT = "left"
    """All ranks have left the training; the snapshots in shared memory hold the state."""
    DONE = "done"
    """All ranks of the new mesh have committed a step."""
    REJECTED = "rejected"
    """Nothing has changed."""
    FAILED = "failed"
    """The run returns to its former mesh, or has never left it."""

    @property
    def is_final(self) -> bool:
        """Whether the request has ended."""
        return self in (ResizeState.DONE, ResizeState.REJECTED, ResizeState.FAILED)


@dataclass(frozen=True)
class RunMesh:
    """Number of ranks, and the arguments by which their mesh differs from that of the start."""

    num_ranks: int
    arguments: tuple[str, ...] = ()
    """Arguments of `train`, such as "--parallelism.tensor_parallel_degree=2"."""

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        return " ".join((ranks, *self.arguments))

    def to_text(self) -> str:
        """Return the number and the arguments as words, quoted as for a shell."""
        return shlex.join((str(self.num_ranks), *self.arguments))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the form of `to_text`. Raises ValueError."""
        number, *arguments = shlex.split(text) or [""]
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{text!r:.60} is not a mesh")
        return cls(int(number), tuple(arguments))


@dataclass(frozen=True, kw_only=True)
class ResizeRequest:
    """Request for a mesh."""

    mesh: RunMesh
    id: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, kw_only=True)
class ResizeAnswer:
    """The answer to a request."""

    id: str
    state: ResizeState
    reason: str = ""


class RequestInbox:
    """Receives and answers requests."""

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        """`folder` is the output folder of the run. A request that an earlier process left there is
        removed. With `is_shared`, other machines may read requests there: a new one is kept."""
        self._folder = folder
        self._read_at_s = self._repeated_at_s = float("-inf")
        self._has_answered = False
        """Whether there was an answer since the last look for a request."""
        self._unwritten: ResizeAnswer | None = None
        """The newest answer, if it could not be written."""
        with suppress(OSError):
            if not (is_shared and _is_new(folder / _REQUEST)):
                (folder / _REQUEST).unlink()

    def poll(self, now_s: float) -> ResizeRequest | None:
        """Return a new request and remove its file, if there is one. A malformed file is removed
        without an answer: it is not that of `torchtitan-lite resize`."""
        if now_s < self._read_at_s + _POLL_S:
            return None
        self._read_at_s = now_s
        if self._has_answered:
            # The answer to another request would replace it before it is read.
            self._has_answered = False
            return None
        # One agent has it, if several machines share the folder.
        path = _own_name(self._folder / _REQUEST)
        try:
            (self._folder / _REQUEST).rename(path)
        except OSError:
            return None
        content = _read(path)
        with suppress(OSError):
            path.unlink()
        match content:
            case {
                "mesh": {"num_ranks": int(num_ranks), "arguments": list(arguments)},
                "id": str(key),
            } if type(num_ranks) is int and num_ranks >= 1 and len(key) <= _MAX_ID_CHARS:
                mesh = RunMesh(num_ranks, tuple(map(str, arguments)))
                return ResizeRequest(mesh=mesh, id=key)
            case _:
                return None

    def answer(self, request: ResizeRequest, state: ResizeState, reason: str = "") -> None:
        """Answer a request. A full disk must not end the run: `repeat` writes the answer later."""
        self._unwritten = ResizeAnswer(id=request.id, state=state, reason=reason)
        self._has_answered = True
        self._write()

    def repeat(self, now_s: float) -> None:
        """Write the newest answer again if that has failed."""
        if self._unwritten is not None and now_s >= self._repeated_at_s + _POLL_S:
            self._repeated_at_s = now_s
            self._write()

    def _write(self) -> None:
        assert self._unwritten is not None
        with suppress(OSError):
            _write(self._folder / _ANSWER, asdict(self._unwritten))
            self._unwritten = None


def send_request(folder: Path, request: ResizeRequest) -> None:
    """Request a resize of the run in `folder`. Raises OSError."""
    _write(folder / _REQUEST, asdict(request))


def read_answer(folder: Path, request: ResizeRequest) -> ResizeAnswer | None:
    """Return the newest answer to `request`; None if there is none yet."""
    match _read(folder / _ANSWER):
        case {"id": request.id, "state": str(state), "reason": str(reason)}:
            with suppress(ValueError):
                return ResizeAnswer(id=request.id, state=ResizeState(state), reason=reason)
    return None


def withdraw_request(folder: Path) -> None:
    """Remove a request that no agent has read."""
    with suppress(OSError):
        (folder / _REQUEST).unlink(missing_ok=True)


def _is_new(path: Path) -> bool:
    """Whether the process that wrote a request may still wait for an agent. Raises OSError."""
    return time.time() - path.stat().st_mtime < ACCEPT_S


def _read(path: Path) -> Any:
    with suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        return json.loads(file.read(_MAX_BYTES))
    return None


def _own_name(path: Path) -> Path:
    """Return a name beside `path` for this process alone, also on storage that machines share."""
    return path.with_suffix(f".{_PROCESS}")


def _write(path: Path, content: Any) -> None:
    partial = _own_name(path)
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)
