"""The horizontal axes that a reader of a report can choose: steps, tokens or time. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchtitan_lite.tools.report.run_files import RunFiles

BUTTONS = {
    "type": "buttons",
    "direction": "right",
    "x": 0,
    "xanchor": "left",
    "y": 1,
    "yanchor": "bottom",
    "pad": {"b": 8},
    "showactive": True,
    "bgcolor": "#f8fafc",
    "bordercolor": "#cbd5e1",
}
"""Style of the buttons of plotly.js above a figure."""


def curve_axes(runs: Sequence[RunFiles], steps: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the layout with buttons that draw curves over steps, tokens or time: each curve is of
    one of `runs` and has its values at `steps`. An axis that a run has not recorded is omitted."""
    longest_s = max((max(run.elapsed_s.values(), default=0.0) for run in runs), default=0.0)
    unit, per_unit = time_unit(longest_s)
    axes: dict[str, tuple[str, list[Any]]] = {"Steps": ("step", [list(step) for step in steps])}
    for label, title, used, per in (
        ("Tokens", "tokens", [run.tokens for run in runs], 1.0),
        ("Time", f"time since the first step ({unit})", [r.elapsed_s for r in runs], per_unit),
    ):
        if all(used):
            x = [_at(run_steps, values, per) for run_steps, values in zip(steps, used, strict=True)]
            axes[label] = (title, x)
    if len(axes) == 1:
        return {}
    buttons = [
        {
            "label": label,
            "method": "update",
            "args": [{"x": x}, {"xaxis.title.text": title, "xaxis.autorange": True}],
        }
        for label, (title, x) in axes.items()
    ]
    place = {"x": 1, "xanchor": "right"}
    return {"updatemenus": [{**BUTTONS, **place, "buttons": buttons}]}


def _at(steps: Sequence[int], used: Mapping[int, float], per: float) -> list[float | None]:
    return [None if (value := used.get(step)) is None else round(value / per, 4) for step in steps]


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit of an axis of that length, and its seconds."""
    if seconds < 300:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
