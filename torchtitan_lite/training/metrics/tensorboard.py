"""TensorBoard files.

TensorBoard is imported and its file opened at the first write, because the import takes longer than
a small step. Records are written without TensorBoard's own writer, whose thread gives up at the
first error of the disk. A run that resumes marks its file so that TensorBoard hides the records of
an earlier process after the resumed step.
"""

import os
import socket
import time
from collections.abc import Iterable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from torchtitan_lite.core.output_files import OutputFaults, RecordFile
from torchtitan_lite.training.metrics.record import Event, StepRecord, scalars

_EVENTS = "train_events"


class TensorBoard:
    """Writes scalars below `folder`, and strings of events as text.

    TensorBoard sorts groups by name. It opens on the losses `loss/train` and `loss/EVENT`; then
    come `train/FIELD`, the other fields of a step, and `train_events/EVENT/VALUE`.
    """

    def __init__(self, folder: Path, resume_step: int, faults: OutputFaults | None = None) -> None:
        """`faults` records failures of the disk."""
        self._folder, self._resume_step = folder, resume_step
        self._faults = faults or OutputFaults()
        self._file: RecordFile | None = None

    def step(self, record: StepRecord) -> None:
        self._write(record.step, _values("train", "train", record.values()))

    def event(self, event: Event) -> None:
        values = _values(event.name, f"{_EVENTS}/{event.name}", event.values)
        self._write(event.step, [*values, *_texts(event)])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, step: int, summaries: Iterable[Any]) -> None:
        """Write one record with all values of `summaries`."""
        values = [value for summary in summaries for value in summary.value]
        if not values:
            return
        if self._file is None:
            self._file = self._open()
        events, summary = _messages("event"), _messages("summary").Summary(value=values)
        record = events.Event(wall_time=time.time(), step=step, summary=summary)
        self._file.append(_framed(record))

    def _open(self) -> RecordFile:
        events, now_s = _messages("event"), time.time()
        name = f"events.out.tfevents.{int(now_s):010}.{socket.gethostname()}.{os.getpid()}.0"
        file = RecordFile(self._folder / name, self._faults)
        version = events.Event(wall_time=now_s, file_version="brain.Event:2")
        purge = events.Event(
            wall_time=now_s,
            step=self._resume_step + 1,
            session_log=events.SessionLog(status=events.SessionLog.START),
        )
        file.append(_framed(version) + _framed(purge))
        return file


def _messages(name: str) -> Any:
    """Return a module of TensorBoard's messages, whose names are made at import."""
    return import_module(f"tensorboard.compat.proto.{name}_pb2")


def _values(name: str, group: str, values: Any) -> list[Any]:
    """Return the scalars of a step or an event of that name; its loss is in the group of losses."""
    from torch.utils.tensorboard.summary import scalar

    return [
        scalar(f"loss/{name}" if field == "loss" else f"{group}/{field}", value)
        for field, value in scalars(values).items()
    ]


def _texts(event: Event) -> list[Any]:
    from torch.utils.tensorboard.summary import text

    # Markdown renders indented text verbatim.
    return [
        text(
            f"{_EVENTS}/{event.name}/{name}",
            "\n".join(f"    {line}" for line in value.splitlines()),
        )
        for name, value in event.values.items()
        if isinstance(value, str)
    ]


def _framed(record: Any) -> bytes:
    """Return a record with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = BytesIO()
    RecordWriter(framed).write(record.SerializeToString())
    return framed.getvalue()
