"""The sample ledger: which samples each rank used, in a form that proves that each was used once.

Before a step is committed, each rank passes a line with its samples to the operating system, so
that the line survives SIGKILL; after the step, a line with the outcome. A process that dies between
the two leaves an undecided attempt. The next generation of the replica decides it: its first line
has the position of the restored state, which contains the step or does not. `report.samples` reads
the ledgers.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torchtitan_lite.core.output_files import OutputFaults, RecordFile
from torchtitan_lite.core.outputs import (
    LEDGER_GENERATION,
    LEDGER_OUTCOME,
    LEDGER_PLACED,
    LEDGER_SAMPLES,
)
from torchtitan_lite.training.metrics.jsonl import cut_torn_line, rotate_file


class StepLedger(Protocol):
    """Records each attempt at a step."""

    def placed(self, step: int, cursor: int) -> None:
        """Record that this replica has received the state after `step`, at the position `cursor`
        in the order of samples."""
        ...

    def begin(
        self,
        step: int,
        cursor: int,
        size: int,
        *,
        share: tuple[int, int],
        token: str,
        samples: Sequence[int],
    ) -> None:
        """Record the attempt at `step`, of `size` samples from `cursor` on. `share` is the index of
        this replica among the participants and their number; `token` is equal on all participants
        and unique to their quorum, empty without replicas; `samples` are those of this rank. Called
        before the commit."""
        ...

    def end(self, outcome: str, step: int, cursor: int) -> None:
        """Record the outcome of the attempt, and the position after it."""
        ...


class NoLedger:
    """Records nothing."""

    def placed(self, step: int, cursor: int) -> None:
        return None

    def begin(
        self,
        step: int,
        cursor: int,
        size: int,
        *,
        share: tuple[int, int],
        token: str,
        samples: Sequence[int],
    ) -> None:
        return None

    def end(self, outcome: str, step: int, cursor: int) -> None:
        return None


class SampleLedger:
    """A `StepLedger` that appends JSON lines to a file."""

    def __init__(
        self,
        path: Path,
        faults: OutputFaults,
        *,
        continues: bool,
        generation_id: str,
        step: int,
        cursor: int,
        rank: int,
        batch_rank: int,
    ) -> None:
        """A run that does not continue the one whose file is there renames it. `generation_id` is
        unique to this start of the replica and equal on its ranks; `step` and `cursor` are the
        position of the restored state; ranks with the same `batch_rank` read the same samples."""
        self._generation_id = generation_id
        self._file = RecordFile(path, faults, partial(_prepare, path, continues=continues))
        self._append(
            LEDGER_GENERATION, step, cursor=cursor, generation_id=generation_id, rank=rank,
            batch_rank=batch_rank,
        )  # fmt: skip

    def placed(self, step: int, cursor: int) -> None:
        self._append(LEDGER_PLACED, step, cursor=cursor)

    def begin(
        self,
        step: int,
        cursor: int,
        size: int,
        *,
        share: tuple[int, int],
        token: str,
        samples: Sequence[int],
    ) -> None:
        index, count = share
        self._append(
            LEDGER_SAMPLES, step, cursor=cursor, size=size, attempt=token or self._generation_id,
            share=index, shares=count, samples=list(samples),
        )  # fmt: skip

    def end(self, outcome: str, step: int, cursor: int) -> None:
        self._append(LEDGER_OUTCOME, step, cursor=cursor, outcome=outcome)

    def close(self) -> None:
        self._file.close()

    def _append(self, event: str, step: int, **values: Any) -> None:
        line = {"event": event, "step": step, "time": time.time(), **values}
        self._file.append(json.dumps(line).encode() + b"\n")


def _prepare(path: Path, *, continues: bool) -> None:
    if path.exists() and path.stat().st_size > 0:
        if continues:
            cut_torn_line(path)
        else:
            rotate_file(path)
