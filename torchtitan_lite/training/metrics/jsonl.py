"""`metrics.jsonl`: the whole history of a run, one JSON object per line.

Invariant: the file contains one history. A run that resumes at step N first drops the lines that an
earlier process wrote after N, so every step is in it once and in order; another run renames an
earlier run's file to `metrics.1.jsonl`, or the next free number. Each line is passed to the
operating system in one write, so that it survives a killed process; `output_files` has what happens
if the disk fails.
"""

import json
import os
from functools import partial
from pathlib import Path

from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_files import OutputFaults, RecordFile
from torchtitan_lite.training.metrics.record import Event, StepRecord


class JsonLines:
    """Appends to the file at `path`. A run that `continues` the one that wrote it first drops
    the lines after `resume_step`, if it resumes from a step; any other run renames the file."""

    def __init__(
        self,
        path: Path,
        resume_step: int,
        *,
        continues: bool | None = None,
        faults: OutputFaults | None = None,
    ) -> None:
        """Open the file. `continues` is by default whether `resume_step` is above 0. `faults`
        records failures of the disk."""
        continues = resume_step > 0 if continues is None else continues
        prepare = partial(_prepare, path, resume_step, continues=continues)
        self._file = RecordFile(
            path,
            faults or OutputFaults(),
            prepare,
            keeps=lambda line: (_step_of(line) or 0) <= resume_step,
        )

    def step(self, record: StepRecord) -> None:
        self._append(record.to_json())

    def event(self, event: Event) -> None:
        self._append(event.to_json())

    def close(self) -> None:
        self._file.close()

    def _append(self, line: str) -> None:
        self._file.append(line.encode() + b"\n")


def _prepare(path: Path, resume_step: int, *, continues: bool) -> None:
    is_there = path.exists() and path.stat().st_size > 0
    if is_there and not continues:
        rotate_file(path)
    elif is_there and resume_step > 0:
        _truncate(path, resume_step)
    elif is_there:
        cut_torn_line(path)


def cut_torn_line(path: Path) -> None:
    """Complete or cut a last line without an end."""
    with open(path, "rb+") as file:
        content = file.read()
        line = content[content.rfind(b"\n") + 1 :]
        if not line:
            return
        if _step_of(line) is None:
            file.truncate(len(content) - len(line))
        else:
            file.write(b"\n")


def rotate_file(path: Path) -> None:
    """Rename an earlier run's file to the next free number."""
    start = f"{path.stem}."
    earlier = (other.name for other in path.parent.glob(f"{start}*{path.suffix}"))
    numbers = (name.removeprefix(start).removesuffix(path.suffix) for name in earlier)
    highest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    target = path.with_name(f"{start}{highest + 1}{path.suffix}")
    path.rename(target)
    logger.info("The metrics of an earlier run are kept in %s.", target)


def _truncate(path: Path, resume_step: int) -> None:
    """Drop damaged lines and those of later steps, in one rename, and log what was dropped."""
    temporary = path.with_name(path.name + ".tmp")
    num_later, damaged = 0, []
    ends_whole = True
    with open(path, "rb") as source, open(temporary, "wb") as target:
        for number, line in enumerate(source, start=1):
            ends_whole = line.endswith(b"\n")
            step = _step_of(line)
            if step is None:
                damaged.append(number)
            elif step > resume_step:
                num_later += 1
            else:
                target.write(line if ends_whole else line + b"\n")
        target.flush()
        os.fsync(target.fileno())
    if not num_later and not damaged and ends_whole:
        temporary.unlink()
        return
    os.replace(temporary, path)
    if num_later:
        logger.info(f"{path}: dropped {num_later} lines of steps after {resume_step}.")
    if damaged:
        numbers = ", ".join(str(number) for number in damaged)
        logger.warning(f"{path}: dropped what was not a whole record, at line {numbers}.")


def _step_of(line: bytes) -> int | None:
    """Return the step of a line; None if the line is not a complete record."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    return step if isinstance(step, int) else None
