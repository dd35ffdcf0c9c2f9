"""A trace as text: equal rows are merged, and layer numbers are replaced by *."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_lite.training.debug.communication import Collective

_MIB = 2**20


def folded(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """Return groups of equal collectives, in the order of their first one."""
    counts: dict[tuple[str, str, str, str, str, int], int] = {}
    for collective in collectives:
        module = fold_module_name(collective.module)
        key = (
            collective.phase,
            module,
            collective.operation,
            collective.axis,
            collective.dtype,
            collective.num_bytes,
        )
        counts[key] = counts.get(key, 0) + 1
    names = ("phase", "module", "operation", "axis", "dtype", "num_bytes")
    return [
        {**dict(zip(names, key, strict=True)), "count": count, "num_bytes_in_all": count * key[-1]}
        for key, count in counts.items()
    ]


def fold_module_name(module: str) -> str:
    """Map layers.3.attention to layers.*.attention."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def trace_table(trace: Mapping[str, Any]) -> str:
    """Return the text of one rank's trace."""
    degrees = ", ".join(f"{axis} {size}" for axis, size in trace["mesh"].items() if size > 1)
    parts = [
        f"Step {trace['step']} on rank {trace['rank']} of the mesh: {degrees or 'one process'}.",
        "Collectives, in the order of the first of each kind. Bytes are those of the entire "
        "tensor of a gather\nor a scatter.",
        columns(
            (
                "phase",
                "module",
                "operation",
                "axis",
                "dtype",
                "count",
                "bytes each",
                "total bytes",
            ),
            [
                (
                    row["phase"],
                    row["module"],
                    row["operation"],
                    row["axis"],
                    row["dtype"],
                    f"{row['count']:,}",
                    f"{row['num_bytes']:,}",
                    f"{row['num_bytes_in_all']:,}",
                )
                for row in trace["grouped"]
            ],
            numbers=3,
        ),
        "Totals by axis.",
        columns(("axis", "count", "total bytes"), _by_axis(trace["grouped"]), numbers=2),
        "Peak memory while the module was running (MiB, maximum over merged layers).",
        columns(
            ("module", "forward", "backward", "elsewhere"),
            _by_module(trace["peak_memory_bytes"]),
            numbers=3,
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _by_axis(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    sums: dict[str, tuple[int, int]] = {}
    for row in rows:
        count, num_bytes = sums.get(row["axis"], (0, 0))
        sums[row["axis"]] = count + row["count"], num_bytes + row["num_bytes_in_all"]
    return [(axis, f"{count:,}", f"{num_bytes:,}") for axis, (count, num_bytes) in sums.items()]


def _by_module(peaks: Mapping[str, Mapping[str, int]]) -> list[tuple[str, ...]]:
    folded: dict[str, dict[str, int]] = {}
    for module, of_module in peaks.items():
        folded_peaks = folded.setdefault(fold_module_name(module), {})
        for phase, num_bytes in of_module.items():
            column = phase if phase in ("forward", "backward") else "elsewhere"
            folded_peaks[column] = max(folded_peaks.get(column, 0), num_bytes)
    return [
        (
            module,
            *(
                f"{of_module[column] / _MIB:,.2f}" if column in of_module else "-"
                for column in ("forward", "backward", "elsewhere")
            ),
        )
        for module, of_module in folded.items()
    ]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int) -> str:
    """Return rows under a header, in columns as wide as needed; the last `numbers` columns are
    right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    first_number = len(head) - numbers
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place >= first_number else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )
