"""The rows that every benchmark ends in: a table for the eye, a JSON list for machines.

Invariant: `met` is computed here, from the numbers of the same run and from nothing else.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. `ours` is set against `peer`, or against `floor` where there is no peer."""

    case: str
    metric: str
    unit: str
    ours: float
    floor: float | None
    peer: float | None
    goal: float
    """The ratio that `ours` may be at most."""
    met: bool


def compare(
    *,
    case: str,
    metric: str,
    unit: str,
    ours: float,
    floor: float | None = None,
    peer: float | None = None,
    goal: float,
    comparable: bool,
) -> Row:
    """The row of medians `ours` and `peer` or `floor`, of which less is better. It is not met when
    the sides did not do the same work (`comparable` false)."""
    reference = peer if peer is not None else floor
    if reference is None:
        raise ValueError(f"{case}, {metric}: neither a floor nor a peer to compare with.")
    return Row(
        case=case,
        metric=metric,
        unit=unit,
        ours=ours,
        floor=floor,
        peer=peer,
        goal=goal,
        met=comparable and ours <= goal * reference,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows under a heading, in columns."""
    lines = [("case", "metric", "unit", "ours", "floor", "peer", "ratio", "goal", "met")]
    lines += [
        (
            row.case,
            row.metric,
            row.unit,
            _number(row.ours),
            _number(row.floor),
            _number(row.peer),
            f"{_ratio(row):.3f}",
            f"<= {row.goal:g}",
            "yes" if row.met else "NO",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _ratio(row: Row) -> float:
    reference = row.peer if row.peer is not None else row.floor
    return row.ours / reference if reference else float("nan")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
