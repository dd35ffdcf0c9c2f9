"""Measured figures of the failure model, taken from benchmarks/results/.

`make docs` writes them to torchtitan_lite/tools/failure_model/measurements.py, so that an
installation has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from scripts.benchmark_page import Result

MODULE = (
    Path(__file__).parents[1] / "torchtitan_lite" / "tools" / "failure_model" / "measurements.py"
)
_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True)
class Origin:
    """A row of a result file, and what the model takes from it."""

    file: str
    case: str
    metric: str
    """Begin of the metric; the number of rounds may follow."""
    key: str = "ours"
    per: str = "value"
    """`value`, seconds per `gib` of the case, or `mib` of the case per second."""


_RANKS = "1 of 4 ranks killed, FSDP-4"
_AGAIN = "until training again, median"
_LOST = "1 of 2 machines lost, 1 spare, state from buddy: it falls silent"
_REPLICAS = "ours, builtin lighthouse"
_SAVES = "1 proc, 474 MB"
_BYTES = "bytes read, unique bytes"
"""Metric with the number of bytes of a case."""
ORIGINS: Mapping[str, Origin] = {
    "restart_s": Origin("rank_recovery", _RANKS, _AGAIN, "peer"),
    "spare_s": Origin("rank_recovery", _RANKS, _AGAIN),
    "lost_machine_s": Origin("lost_machine", _LOST, _AGAIN),
    "replica_stall_s": Origin("recovery", _REPLICAS, "survivor's stall, median"),
    "lost_machine_stall_s": Origin("recovery", "link of 1 of 2 replicas cut", "longest pause"),
    "replica_restart_s": Origin("recovery", _REPLICAS, "restart to first committed step, median"),
    "donor_stall_s": Origin("recovery", _REPLICAS, "donor's stall, median"),
    "torchft_stall_s": Origin("recovery", _REPLICAS, "survivor's stall, median", "peer"),
    "torchft_restart_s": Origin(
        "recovery", _REPLICAS, "restart to first committed step, median", "peer"
    ),
    "torchft_donor_stall_s": Origin("recovery", _REPLICAS, "donor's stall, median", "peer"),
    "heal_mib_per_s": Origin("recovery", "heal of", "rate by 4 connections"),
    "load_mib_per_s": Origin("checkpoint", _SAVES, "load, cold", per="mib"),
    "write_mib_per_s": Origin("checkpoint", _SAVES, "synchronous save", per="mib"),
    "snapshot_load_mib_per_s": Origin("checkpoint", _SAVES, "back from shared memory", per="mib"),
    "save_s_per_gib": Origin("checkpoint", _SAVES, "extra wall of a save", per="gib"),
    "async_save_s_per_gib": Origin(
        "checkpoint", _SAVES, "extra wall of a save, torchtitan async", "peer", per="gib"
    ),
    "snapshot_s_per_gib": Origin("checkpoint", _SAVES, "extra wall time of a snapshot", per="gib"),
}


def measurements(results: Mapping[str, Result]) -> dict[str, tuple[float, str]]:
    """Return the value of each figure, and its origin in words. Raises LookupError if a result has
    no such row."""
    return {
        name: (_value(origin, results), _words(origin, results)) for name, origin in ORIGINS.items()
    }


def module_text(figures: Mapping[str, tuple[float, str]]) -> str:
    """Return the source of the module."""
    lines = [
        '"""Figures measured in this repository, by name, with their origins.',
        "",
        "Written by `make docs` from benchmarks/results/.",
        '"""',
        "",
        "MEASUREMENTS: dict[str, tuple[float, str]] = {",
    ]
    for name, (value, words) in figures.items():
        # The lines of a long text, in the width of the source.
        parts = wrap(words, 89, drop_whitespace=False)
        texts = "\n".join(f'        "{part}"' for part in parts)
        lines += [f'    "{name}": (', f"        {value!r},", f"{texts},", "    ),"]
    return "\n".join([*lines, "}", ""])


def _row(origin: Origin, metric: str, results: Mapping[str, Result]) -> dict[str, Any]:
    rows = results[origin.file].rows if origin.file in results else []
    for row in rows:
        if row["case"].startswith(origin.case) and row["metric"].startswith(metric):
            return row
    raise LookupError(f"{origin.file}.json has no row {origin.case!r}, {metric!r}.")


def _value(origin: Origin, results: Mapping[str, Result]) -> float:
    value = float(_row(origin, origin.metric, results)[origin.key])
    if origin.per == "value":
        return _rounded(value)
    num_bytes = float(_row(origin, _BYTES, results)["floor"])
    return _rounded(value / (num_bytes / _GIB) if origin.per == "gib" else num_bytes / _MIB / value)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _words(origin: Origin, results: Mapping[str, Result]) -> str:
    row = _row(origin, origin.metric, results)
    derived = {"value": "", "gib": ", per GiB", "mib": ", as a rate"}[origin.per]
    return f"{origin.file}.json, {row['case']}, {row['metric']}, {origin.key}{derived}"
