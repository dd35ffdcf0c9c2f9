"""The command of a benchmark, and what it says: how its sides agree, case by case as they are
measured, then its rows."""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from benchmarks.agreement import Agreement
from benchmarks.processes import THREADS, ChildFailed
from benchmarks.rows import Row, table, write_json

PlanT = TypeVar("PlanT")
Measured = Iterable[tuple[Row, Agreement]]


def main(
    description: str, measure: Callable[[PlanT, Path], Measured], *, full: PlanT, quick: PlanT
) -> NoReturn:
    """Entry of the command: measure one of two plans, with a folder for files.

    The program ends with 1 when the sides of a case did not do the same work.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small version")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        all_agree = report(measure(quick if given.quick else full, Path(folder)), given.json)
    sys.exit(0 if all_agree else 1)


def report(measured: Measured, json_path: Path | None) -> bool:
    """Print what is `measured` and write the rows. Returns whether the sides of every case did the
    same work. Ends the program when a measured process fails."""
    began_s = time.perf_counter()
    print(
        f"torch {version('torch')}, Python {platform.python_version()}, "
        f"OMP_NUM_THREADS={THREADS} in every process",
        flush=True,
    )
    rows, all_agree, shown = [], True, None
    try:
        for row, agreement in measured:
            # One agreement may be that of several rows.
            if agreement is not shown:
                print(agreement.text(), flush=True)
            shown = agreement
            rows.append(row)
            all_agree = all_agree and agreement.holds
    except ChildFailed as failure:
        sys.exit(str(failure))
    print(f"\n{table(rows)}\n\n{time.perf_counter() - began_s:.0f} s in all")
    if json_path:
        write_json(json_path, rows)
    return all_agree
