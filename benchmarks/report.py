"""What a benchmark says: how its sides agree, case by case as they are measured, then its rows."""

import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from benchmarks.agreement import Agreement
from benchmarks.processes import THREADS, ChildFailed
from benchmarks.rows import Row, table, write_json


def report(measured: Iterable[tuple[Row, Agreement]], json_path: Path | None) -> bool:
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
