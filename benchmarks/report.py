"""The command of a benchmark, and what it says: how its sides agree, case by case as they are
measured, then its rows.

With `--json NAME.json`, machine, versions and date go into NAME.environment.json beside it.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from benchmarks.agreement import Agreement
from benchmarks.processes import THREADS, ChildFailed
from benchmarks.rows import Row, table, write_json

_PEERS = ("torch", "torchft", "torchtitan", "safetensors", "transformers", "numpy")

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
        text = json.dumps(environment(), indent=1) + "\n"
        json_path.with_suffix(".environment.json").write_text(text, encoding="utf-8")
    return all_agree


def environment() -> dict[str, Any]:
    """Where and with what the rows were measured."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine + (f", {gpu}" if gpu else ", no GPU"),
        "gpu": gpu,
        "threads_per_process": THREADS,
        "versions": {"Python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "command": " ".join(["python -m", *sys.orig_argv[sys.orig_argv.index("-m") + 1 :]])
        if "-m" in sys.orig_argv
        else None,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        names = re.findall(
            r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The revision that was measured; "-dirty" behind it, with changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
