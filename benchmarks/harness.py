"""The harness of the benchmarks: command line, comparisons and result rows.

A benchmark compares variants that do the same work: ours, a floor (the least work that the task
needs) and, where one exists, a peer. A `Comparison` records whether they did the same work; its
rows are medians of the variants with a goal. With `--json NAME.json`, machine, versions and date go
into NAME.environment.json beside the rows.

Invariant: `met` is computed here, from the numbers of the same run and from nothing else, and is
false if the variants did not do the same work.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from benchmarks.processes import THREADS, ChildFailed

LOSS_TOLERANCE = 1e-5
"""Relative. The same float32 sums in another order; a wrong scale or sample is far beyond it."""
_RECORDED_VERSIONS = ("torch", "torchft", "torchtitan", "safetensors", "transformers", "numpy")

PlanT = TypeVar("PlanT")


class GoalKind(Enum):
    """Bound of a goal. The values are shown in tables."""

    RATIO_AT_MOST = "<="
    RATIO_AT_LEAST = ">="
    AT_MOST = "value <="
    AT_LEAST = "value >="
    NONE = "-"

    def is_met(self, ours: float, bound: float) -> bool:
        """Whether `ours` is within the bound; nan is not."""
        return (
            ours <= bound if self in (GoalKind.RATIO_AT_MOST, GoalKind.AT_MOST) else ours >= bound
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One result. `ours` is compared with `peer`, or with `floor` if there is no peer."""

    case: str
    metric: str
    unit: str
    ours: float
    floor: float | None = None
    peer: float | None = None
    goal: float | None = None
    """Bound of the ratio of `ours` to the reference, or of `ours` itself: see `kind`."""
    met: bool
    kind: GoalKind

    @property
    def reference(self) -> float | None:
        return self.peer if self.peer is not None else self.floor

    @property
    def ratio(self) -> float | None:
        return self.ours / self.reference if self.reference else None


class Comparison:
    """Evidence that the variants of a case did the same work, and the rows of the case.

    Ours is compared with the `other` variant; every difference is reported and fails the rows.
    """

    def __init__(self, case: str, part: str = "", *, other: str = "floor") -> None:
        """`part` of the case, for the heading of the evidence."""
        self._case, self._other = case, other
        self._lines = [f"{case}: {part}" if part else case]
        self._faults: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether the variants did the same work, as far as it was checked."""
        return not self._faults

    def same(self, name: str, ours: Any, other: Any) -> None:
        """Require equal values."""
        self.note(f"{name}: ours {ours}, {self._other} {other}")
        if ours != other:
            self._faults.append(f"{name} differs: ours {ours}, {self._other} {other}")

    def close_losses(self, ours: Sequence[float], other: Sequence[float], *, shown: int) -> None:
        """Require equal losses in every step, and show about `shown` of them."""
        if len(ours) != len(other) or not ours:
            self._faults.append(
                f"ours has the losses of {len(ours)} steps, {self._other} of {len(other)}"
            )
        stride = max(1, -(-len(ours) // shown))
        for step, (a, b) in enumerate(zip(ours, other, strict=False), start=1):
            if step % stride == 1 % stride or step == len(ours):
                self.note(f"loss of step {step}: ours {a:.7f}, {self._other} {b:.7f}")
            # Written so that nan is a fault.
            if not abs(a - b) <= LOSS_TOLERANCE * abs(b):
                self._faults.append(f"the loss of step {step} differs: ours {a}, {self._other} {b}")

    def small(self, name: str, difference: float, tolerance: float) -> None:
        """Require a difference within its tolerance."""
        self.note(f"{name}: {difference:.2g} (at most {tolerance:g})")
        # Written so that nan is a fault.
        if not difference <= tolerance:
            self._faults.append(f"{name} is {difference}, above {tolerance}")

    def note(self, line: str) -> None:
        """Show a line with the case."""
        self._lines.append(f"  {line}")

    def text(self) -> str:
        """The evidence, faults last."""
        return "\n".join([*self._lines, *(f"  FAILED: {fault}" for fault in self._faults)])

    def ratio(
        self,
        metric: str,
        unit: str,
        ours: float,
        *,
        floor: float | None = None,
        peer: float | None = None,
        goal: float,
        more_is_better: bool = False,
    ) -> "Result":
        """The row of a value whose ratio to `peer`, or else to `floor`, is bounded by `goal`."""
        reference = peer if peer is not None else floor
        if reference is None:
            raise ValueError(f"{self._case}, {metric}: neither a floor nor a peer to compare with.")
        kind = GoalKind.RATIO_AT_LEAST if more_is_better else GoalKind.RATIO_AT_MOST
        met = kind.is_met(ours, goal * reference)
        return self._row(metric, unit, ours, floor=floor, peer=peer, goal=goal, kind=kind, met=met)

    def value(
        self,
        metric: str,
        unit: str,
        ours: float,
        *,
        peer: float | None = None,
        goal: float | None = None,
        more_is_better: bool = False,
        valid: bool = True,
    ) -> "Result":
        """The row of a value that `goal` itself bounds, if there is one. `peer` is only shown."""
        kind = GoalKind.AT_LEAST if more_is_better else GoalKind.AT_MOST
        kind = GoalKind.NONE if goal is None else kind
        met = valid and (goal is None or kind.is_met(ours, goal))
        return self._row(metric, unit, ours, peer=peer, goal=goal, kind=kind, met=met)

    def _row(self, metric: str, unit: str, ours: float, *, met: bool, **values: Any) -> "Result":
        met = met and self.holds
        return Row(case=self._case, metric=metric, unit=unit, ours=ours, met=met, **values), self


Result = tuple[Row, Comparison]


def main(
    description: str,
    measure: Callable[[PlanT, Path], Iterable[Result]],
    *,
    full: PlanT,
    quick: PlanT,
) -> NoReturn:
    """Entry of a benchmark's command: measure one of two plans, with a folder for files.

    The exit status is 1 if the variants of a case did not do the same work.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small version")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        all_hold = report(measure(quick if options.quick else full, Path(folder)), options.json)
    sys.exit(0 if all_hold else 1)


def report(results: Iterable[Result], json_path: Path | None) -> bool:
    """Print the evidence of each case as it is measured, then all rows; write them to `json_path`.

    Returns whether the variants of every case did the same work. Exits if a measured process fails.
    """
    began_s = time.perf_counter()
    print(
        f"torch {version('torch')}, Python {platform.python_version()}, "
        f"OMP_NUM_THREADS={THREADS} in every process",
        flush=True,
    )
    rows, all_hold, shown = [], True, None
    try:
        for row, comparison in results:
            # A comparison may have several rows.
            if comparison is not shown:
                print(comparison.text(), flush=True)
            shown = comparison
            rows.append(row)
            all_hold = all_hold and comparison.holds
    except ChildFailed as failure:
        sys.exit(str(failure))
    print(f"\n{_table(rows)}\n\n{time.perf_counter() - began_s:.0f} s in total")
    if json_path:
        _write_json(json_path, rows)
        text = json.dumps(_environment(), indent=1) + "\n"
        json_path.with_suffix(".environment.json").write_text(text, encoding="utf-8")
    return all_hold


def formatted(values: Iterable[float], form: str = ".3g", *, scale: float = 1.0) -> str:
    """The values of a variant's turns in one line."""
    return " ".join(f"{scale * value:{form}}" for value in values)


def _table(rows: Sequence[Row]) -> str:
    lines = [("case", "metric", "unit", "ours", "floor", "peer", "ratio", "goal", "met")]
    lines += [
        (
            row.case,
            row.metric,
            row.unit,
            *map(_number, (row.ours, row.floor, row.peer, row.ratio)),
            row.kind.value if row.goal is None else f"{row.kind.value} {row.goal:g}",
            "yes" if row.met else "NO",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write a JSON list with one row per line, without absent values."""
    plain = (asdict(row) | {"kind": row.kind.value} for row in rows)
    lines = (
        json.dumps({key: value for key, value in row.items() if value is not None}) for row in plain
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def _environment() -> dict[str, Any]:
    """Machine, versions, date and command of the rows."""
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
    versions = {}
    for name in _RECORDED_VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    names = re.findall(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The measured revision; "-dirty" is appended if there are uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
