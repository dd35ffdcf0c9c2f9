"""Standard output and standard error that never raise.

A print into a file on a full disk, or into a pipe whose reader has exited, raises OSError, which
would end training.
"""

import io
import os
import sys
from contextlib import suppress
from typing import Any

_MAX_WAITING_BYTES = 1 << 20


class _PatientStream(io.RawIOBase):
    """A descriptor. What cannot be written waits in bounded memory for the next write; beyond it,
    the oldest output is lost."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._num_lost = 0

    def write(self, content: Any) -> int:
        length = memoryview(content).nbytes
        self._waiting += content
        try:
            self._flush()
        except OSError:
            excess = len(self._waiting) - _MAX_WAITING_BYTES
            if excess > 0:
                del self._waiting[:excess]
                self._num_lost += excess
        return length

    def _flush(self) -> None:
        if self._num_lost:
            os.write(self._descriptor, b"\n[%d bytes of output are lost]\n" % self._num_lost)
            self._num_lost = 0
        while self._waiting:
            del self._waiting[: os.write(self._descriptor, self._waiting)]

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def make_streams_patient() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise for a disk or a pipe.
    Streams that a test or a notebook has redirected are kept. Idempotent."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = _patient(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _patient(sys.stderr, 2)


def _patient(stream: Any, descriptor: int) -> Any:
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != descriptor:
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_PatientStream(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )
