"""TensorBoard files. Layer: above record.

TensorBoard is imported and its file opened at the first write, because the import takes longer than
a small step. A run that resumes marks its file so that TensorBoard hides the records of an earlier
process after the resumed step.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite.metrics.record import Event, StepRecord, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

_FLUSH_SECS = 10
"""Records that a killed process can lose, in seconds."""


class TensorBoard:
    """Writes scalars `train/FIELD` and `EVENT/VALUE` below `folder`, and strings of events as
    text."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        self._folder = folder
        self._resume_step = resume_step
        self._writer: SummaryWriter | None = None

    def step(self, record: StepRecord) -> None:
        self._write("train", record.step, record.values())

    def event(self, event: Event) -> None:
        self._write(event.name, event.step, event.values)
        for name, value in event.values.items():
            if isinstance(value, str):
                # Markdown renders indented text verbatim.
                text = "\n".join(f"    {line}" for line in value.splitlines())
                self._open().add_text(f"{event.name}/{name}", text, event.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        for name, value in scalars(values).items():
            self._open().add_scalar(f"{group}/{name}", value, step)

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(
                str(self._folder), purge_step=self._resume_step + 1, flush_secs=_FLUSH_SECS
            )
        return self._writer
