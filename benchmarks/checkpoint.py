"""Saving and loading a training state against torch DCP, as torchtitan uses it and at its best, and
against plain copies and files.

python -m benchmarks.checkpoint [--quick] [--json PATH]

A state of a model and both moments of AdamW, sharded over 1, 2 and 4 gloo ranks of one thread. The
honest cost of a save is what it adds to the wall time of the steps beside which it is made:
background work counts. Blocked seconds, CPU seconds of all processes until the save is durable, and
the time until then are shown too. Which way to save comes when is drawn anew in each round.

Exits with 1 when a process fails; a missed goal is a row that says so.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.checkpoint_cost import CheckpointCase, measure_case
from benchmarks.report import report
from benchmarks.rows import Row

FULL = [
    CheckpointCase(num_processes=number, layers=12, rounds=7, step_seconds=0.35)
    for number in (1, 2, 4)
]
QUICK = [CheckpointCase(num_processes=2, layers=1, rounds=2, step_seconds=0.02)]


def main() -> None:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description="Checkpoints against torch DCP and plain files.")
    parser.add_argument("--quick", action="store_true", help="a small version, under 50 seconds")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    # Below the current folder, since the usual place of temporary files may be memory.
    with tempfile.TemporaryDirectory(dir=".") as folder:
        all_agree = report(measure(QUICK if given.quick else FULL, Path(folder)), given.json)
    sys.exit(0 if all_agree else 1)


def measure(cases: Sequence[CheckpointCase], folder: Path) -> Iterator[tuple[Row, Agreement]]:
    """The cases, one after the other, with their files in `folder`."""
    for case in cases:
        yield from measure_case(case, folder.absolute() / f"of_{case.num_processes}")


if __name__ == "__main__":
    main()
