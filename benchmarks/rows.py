"""The rows that every benchmark ends in: a table for the eye, a JSON list for machines.

Invariant: `met` is computed here, from the numbers of the same run and from nothing else.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Kind(Enum):
    """What a goal bounds. The values are shown to people."""

    RATIO_AT_MOST = "<="
    RATIO_AT_LEAST = ">="
    AT_MOST = "value <="
    AT_LEAST = "value >="
    NOTHING = "-"

    def holds(self, ours: float, bound: float) -> bool:
        """Written so that nan does not."""
        return ours <= bound if self in (Kind.RATIO_AT_MOST, Kind.AT_MOST) else ours >= bound


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison. `ours` is set against `peer`, or against `floor` where there is no peer."""

    case: str
    metric: str
    unit: str
    ours: float
    floor: float | None = None
    peer: float | None = None
    goal: float | None = None
    """What the ratio of `ours` to the reference may be, or `ours` itself: see `kind`."""
    met: bool
    kind: Kind
    """How `goal` is meant; its value in the JSON."""


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
    more_is_better: bool = False,
) -> Row:
    """The row of medians `ours` and `peer` or `floor`, of which less is better if not said
    otherwise, and `goal` bounds the ratio. It is not met when the sides did not do the same work
    (`comparable` false)."""
    reference = peer if peer is not None else floor
    if reference is None:
        raise ValueError(f"{case}, {metric}: neither a floor nor a peer to compare with.")
    kind = Kind.RATIO_AT_LEAST if more_is_better else Kind.RATIO_AT_MOST
    return Row(
        case=case,
        metric=metric,
        unit=unit,
        ours=ours,
        floor=floor,
        peer=peer,
        goal=goal,
        met=comparable and kind.holds(ours, goal * reference),
        kind=kind,
    )


def demand(
    *,
    case: str,
    metric: str,
    unit: str,
    ours: float,
    peer: float | None = None,
    goal: float,
    comparable: bool,
    more_is_better: bool = False,
) -> Row:
    """The row of a number that has a goal of its own, in its unit, which it may not be above (or,
    where more is better, below). `peer` is shown beside it. `comparable` is as in `compare`."""
    kind = Kind.AT_LEAST if more_is_better else Kind.AT_MOST
    return Row(
        case=case,
        metric=metric,
        unit=unit,
        ours=ours,
        peer=peer,
        goal=goal,
        met=comparable and kind.holds(ours, goal),
        kind=kind,
    )


def tell(
    *,
    case: str,
    metric: str,
    unit: str,
    ours: float,
    peer: float | None = None,
    comparable: bool,
) -> Row:
    """The row of a number that explains others and has no goal: it is met when the sides did the
    same work."""
    return Row(
        case=case,
        metric=metric,
        unit=unit,
        ours=ours,
        peer=peer,
        met=comparable,
        kind=Kind.NOTHING,
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
            _number(_ratio(row)),
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


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([_plain(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _plain(row: Row) -> dict[str, Any]:
    return asdict(row) | {"kind": row.kind.value}


def _ratio(row: Row) -> float | None:
    reference = row.peer if row.peer is not None else row.floor
    return row.ours / reference if reference else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
