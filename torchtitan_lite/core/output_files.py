"""Output files that never end training.

If a disk is full, read-only or gone, records wait in bounded memory and are written in their order
when the disk accepts them again. So do those of a generation that must not write yet, see
`output_fence`, whatever their size. Invariant: a file holds whole records, each once.
"""

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import withholds_outputs

_MAX_WAITING_BYTES = 4 << 20
"""Limit of the records of a file that wait in memory. Beyond it, the oldest are lost."""

_WITHHELD: "set[RecordFile]" = set()
"""Files of this process that wait until outputs are allowed."""
_LEFT: "dict[Path, tuple[Callable[[], None], list[bytes]]]" = {}
"""What the last file at a path could not do because outputs were withheld: its preparation, and its
records."""


@dataclass
class _Output:
    """State of an output that has failed."""

    error: str
    waiting: int = 0
    """Records that wait in memory."""
    late: int = 0
    """Records written after they had waited, in this outage."""
    lost: int = 0
    """Records lost since the start of the process."""
    is_failing: bool = True


@dataclass
class OutputFaults:
    """Failures of the outputs of this process. An outage begins with the first output that fails
    and ends when all work again; it causes one warning, and one event at its end."""

    report: Callable[[str], None] = logger.warning
    _outputs: dict[str, _Output] = field(default_factory=dict[str, _Output])
    _since_s: float = 0.0
    _ended: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def failed(self, name: str, error: OSError, *, waiting: int = 0, lost: int = 0) -> None:
        """Record that `name` cannot be written: `waiting` records are in memory, and `lost` more
        records are lost."""
        reason, was_failing = error.strerror or str(error), self.is_failing
        output = self._outputs.setdefault(name, _Output(reason))
        output.error, output.waiting, output.is_failing = reason, waiting, True
        output.lost += lost
        if not was_failing:
            self._since_s = time.monotonic()
            # Last, because `report` may write to another output on the same disk.
            self.report(
                f"{name} cannot be written: {reason}. Training continues; metrics and other "
                "records wait in memory until they can be written."
            )

    def works(self, name: str, *, late: int = 0) -> None:
        """Record that `name` was written, after `late` records had waited."""
        output = self._outputs.get(name)
        if output is None or not output.is_failing:
            return
        output.is_failing, output.waiting = False, 0
        output.late += late
        if self.is_failing:
            return
        seconds = time.monotonic() - self._since_s
        written, lost = (sum(getattr(output, key) for output in self._outputs.values())
                         for key in ("late", "lost"))  # fmt: skip
        self.report(
            f"Outputs can be written again after {seconds:.0f} s: {written} records were written "
            f"late, {lost} are lost since the start of this process."
        )
        values = {"seconds": seconds, "written_late": written, "lost": lost}
        self._ended.append(values | {"outputs": sorted(self._outputs)})
        for output in self._outputs.values():
            output.late = 0

    def lose(self, name: str, error: OSError) -> None:
        """Record that a file which is written once was not written."""
        output = self._outputs.setdefault(name, _Output("", is_failing=False))
        output.error, output.lost = error.strerror or str(error), output.lost + 1
        self.report(f"{name} was not written: {output.error}. Training continues.")

    @contextmanager
    def tolerating(self, name: str) -> Iterator[None]:
        """Record an OSError of the block as the loss of `name`."""
        try:
            yield
        except OSError as error:
            self.lose(name, error)

    @property
    def is_failing(self) -> bool:
        """Whether an output cannot be written now."""
        return any(output.is_failing for output in self._outputs.values())

    def ended_outages(self) -> list[dict[str, Any]]:
        """Return the outages that ended since the last call, as values of an event."""
        ended, self._ended = self._ended, []
        return ended

    def summary(self) -> list[str]:
        """Return one line per output whose records are lost or still wait."""
        return [
            f"{name}: {output.lost + output.waiting} records not written ({output.error})"
            for name, output in sorted(self._outputs.items())
            if output.lost + output.waiting
        ]


def flush_withheld() -> None:
    """Write the records that were withheld, if outputs are allowed now."""
    for file in [*_WITHHELD] if _WITHHELD and not withholds_outputs() else ():
        file.flush()


class RecordFile:
    """Appends records to a file. A record has reached the operating system when `append` returns,
    so that it survives a killed process, unless the disk fails."""

    def __init__(
        self,
        path: Path,
        faults: OutputFaults,
        prepare: Callable[[], None] = lambda: None,
        *,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        keeps: Callable[[bytes], bool] = lambda record: True,
    ) -> None:
        """`prepare` is called before the file is opened for the first time, and again if it raises
        OSError. `keeps` returns whether a record that an aborted training of this process could not
        write is still valid."""
        self._path, self._faults, self._prepare = path, faults, prepare
        self._max_waiting_bytes = max_waiting_bytes
        self._file: FileIO | None = None
        self._is_prepared = False
        self._written: tuple[int, int] | None = None
        """Inode of the file, and its size after the last record."""
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._take_over(keeps)
        self.flush()

    def _take_over(self, keeps: Callable[[bytes], bool]) -> None:
        """Continue a file that was closed while outputs were withheld, as if it had been written
        and then opened."""
        prepare_former, records = _LEFT.pop(self._path, (None, []))
        if prepare_former is not None:
            prepare = self._prepare

            def prepare_both() -> None:
                prepare_former()
                prepare()

            self._prepare = prepare_both
        for record in filter(keeps, records):
            self._waiting.append(record)
            self._num_waiting_bytes += len(record)

    def append(self, record: bytes) -> None:
        """Write a record, after those that wait; or keep it in memory."""
        self._waiting.append(record)
        self._num_waiting_bytes += len(record)
        self.flush()

    def flush(self) -> None:
        """Write the records that wait."""
        if withholds_outputs():
            _WITHHELD.add(self)
            return
        _WITHHELD.discard(self)
        num_late = len(self._waiting)
        try:
            self._open()
            while self._waiting:
                self._write(self._waiting[0])
                self._num_waiting_bytes -= len(self._waiting.popleft())
        except OSError as error:
            # The path may be on another disk at the next attempt.
            self._close()
            num_lost = self._drop_oldest()
            waiting = len(self._waiting)
            self._faults.failed(self._path.name, error, waiting=waiting, lost=num_lost)
        else:
            self._faults.works(self._path.name, late=num_late)

    def close(self) -> None:
        """Write what waits, if possible, and close the file. If outputs are still withheld, the
        training was aborted, and records that wait are for the next file at this path."""
        self.flush()
        self._close()
        if self in _WITHHELD:
            _WITHHELD.discard(self)
            _LEFT[self._path] = self._prepare, [*self._waiting]

    def _drop_oldest(self) -> int:
        num_lost = 0
        while self._num_waiting_bytes > self._max_waiting_bytes:
            self._num_waiting_bytes -= len(self._waiting.popleft())
            num_lost += 1
        return num_lost

    def _open(self) -> None:
        if self._file is not None:
            if os.fstat(self._file.fileno()).st_nlink:
                return
            # The file was deleted: records in it would be invisible.
            self._close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_prepared:
            self._prepare()
            self._is_prepared = True
        # Unbuffered: one record is one write.
        self._file = FileIO(self._path, "a")
        stat = os.fstat(self._file.fileno())
        if self._written is not None and self._written[0] == stat.st_ino:
            # A record that was written in part when the disk failed.
            os.ftruncate(self._file.fileno(), min(self._written[1], stat.st_size))
        stat = os.fstat(self._file.fileno())
        self._written = stat.st_ino, stat.st_size

    def _write(self, record: bytes) -> None:
        assert self._file is not None and self._written is not None
        inode, size = self._written
        if self._file.write(record) != len(record):
            os.ftruncate(self._file.fileno(), size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._written = inode, size + len(record)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
