"""Goodput of a run, formatted from its time accounting."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.core.durations import clock
from torchtitan_lite.core.phases import TIME_NAMES

_MIN_SHOWN_S = 0.05
"""Shorter times would be shown as 0.0 s."""


def read(path: Path) -> Mapping[str, float] | None:
    """Read the goodput and the seconds in a replica's file `goodput.json`, all of them finite.
    Return None if the file is missing or damaged."""
    try:
        values = json.loads(path.read_text())
        figures = {
            key: float(value)
            for key, value in values.items()
            if (key == "goodput" or key.endswith("_s")) and _is_number(value)
        }
    except (OSError, ValueError, AttributeError, OverflowError, RecursionError):
        return None
    is_whole = figures.keys() >= {"goodput", "wall_s", "lost_s"}
    return figures if is_whole and all(map(math.isfinite, figures.values())) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def line(values: Mapping[str, Any]) -> str:
    """Format the goodput in one line."""
    return (
        f"goodput {values['goodput']:.1%} of {values['wall_s']:.0f} s, "
        f"{values['lost_s']:.1f} s of work lost"
    )


def table(values: Mapping[str, Any]) -> list[str]:
    """Format the goodput and the time by cause, the largest first, as lines of a table."""
    wall_s = max(float(values["wall_s"]), 1e-9)
    seconds = {
        key.removesuffix("_s"): float(value)
        for key, value in values.items()
        if key.endswith("_s") and key != "wall_s" and _is_number(value) and value >= _MIN_SHOWN_S
    }
    causes = sorted(seconds.items(), key=lambda cause: -cause[1])
    return [
        f"Goodput      {values['goodput']:.1%} of {clock(wall_s)} since the first start",
        *(
            f"  {TIME_NAMES.get(cause, cause):<21}{taken:>12,.1f} s{taken / wall_s:>8.1%}"
            for cause, taken in causes
        ),
    ]
