"""Saving and loading a training state against torch DCP, as torchtitan uses it and at its best,
against torchtitan's own manager where it is installed (benchmarks/checkpoint_torchtitan.py), and
against plain copies and files.

python -m benchmarks.checkpoint [--quick] [--json PATH]

A state of a model and both moments of AdamW, sharded over 1, 2 and 4 gloo ranks of one thread. The
honest cost of a save is what it adds to the wall time of the steps beside which it is made:
background work counts. Blocked seconds, CPU seconds of all processes until the save is durable, and
the time until then are shown too. Which way to save comes when is drawn anew in each round. The
files lie where temporary files do, which should be a disk.

Exits with 1 when a process fails; a missed goal is a row that says so.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.checkpoint_cost import CheckpointCase, measure_case
from benchmarks.report import main
from benchmarks.rows import Row

FULL = [
    CheckpointCase(num_processes=number, layers=12, rounds=5, step_seconds=0.3)
    for number in (1, 2, 4)
]
QUICK = [CheckpointCase(num_processes=2, layers=1, rounds=2, step_seconds=0.02, crashes=1)]


def measure(cases: Sequence[CheckpointCase], folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """The cases, one after the other, with their files in `folder`."""
    for case in cases:
        yield from measure_case(case, folder / f"of_{case.num_processes}")


if __name__ == "__main__":
    main("Checkpoints against torch DCP and plain files.", measure, full=FULL, quick=QUICK)
