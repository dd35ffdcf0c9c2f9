"""TensorBoard files. Layer: above record.

TensorBoard is imported and its file opened at the first write, because the import takes longer than
a small step. Records are written without TensorBoard's own writer, whose thread gives up at the
first error of the disk. A run that resumes marks its file so that TensorBoard hides the records of
an earlier process after the resumed step.
"""

import os
import socket
import time
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from torchtitan_lite.metrics.record import Event, StepRecord, scalars
from torchtitan_lite.output_files import OutputFaults, RecordFile


class TensorBoard:
    """Writes scalars `train/FIELD` and `EVENT/VALUE` below `folder`, and strings of events as
    text."""

    def __init__(self, folder: Path, resume_step: int, faults: OutputFaults | None = None) -> None:
        """`faults` records failures of the disk."""
        self._folder, self._resume_step = folder, resume_step
        self._faults = faults or OutputFaults()
        self._file: RecordFile | None = None

    def step(self, record: StepRecord) -> None:
        self._write(record.step, _values("train", record.values()))

    def event(self, event: Event) -> None:
        self._write(event.step, [*_values(event.name, event.values), *_texts(event)])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, step: int, summaries: Iterable[Any]) -> None:
        """Write one record with all values of `summaries`."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [value for summary in summaries for value in summary.value]
        if not values:
            return
        if self._file is None:
            self._file = self._open()
        record = Record(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.append(_framed(record))

    def _open(self) -> RecordFile:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog

        now_s = time.time()
        name = f"events.out.tfevents.{int(now_s):010}.{socket.gethostname()}.{os.getpid()}.0"
        file = RecordFile(self._folder / name, self._faults)
        purge = Record(
            wall_time=now_s,
            step=self._resume_step + 1,
            session_log=SessionLog(status=SessionLog.START),
        )
        file.append(_framed(Record(wall_time=now_s, file_version="brain.Event:2")) + _framed(purge))
        return file


def _values(group: str, values: Any) -> list[Any]:
    from torch.utils.tensorboard.summary import scalar

    return [scalar(f"{group}/{name}", value) for name, value in scalars(values).items()]


def _texts(event: Event) -> list[Any]:
    from torch.utils.tensorboard.summary import text

    # Markdown renders indented text verbatim.
    return [
        text(f"{event.name}/{name}", "\n".join(f"    {line}" for line in value.splitlines()))
        for name, value in event.values.items()
        if isinstance(value, str)
    ]


def _framed(record: Any) -> bytes:
    """Return a record with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = BytesIO()
    RecordWriter(framed).write(record.SerializeToString())
    return framed.getvalue()
