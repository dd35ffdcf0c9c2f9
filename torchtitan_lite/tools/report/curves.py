"""Curves as figures of plotly.js: their horizontal axis is steps, tokens or time. Pure."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.tools.report.run_files import RunFiles

MAX_POINTS = 3000
"""Maximum points of a curve; beyond it, only the minimum and maximum of each interval are drawn."""
_BUTTONS_PX = 32
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_GRID, _TEXT = "#e5e7eb", "#334155"
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


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the page."""

    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    note: str = ""
    is_wide: bool = False


@dataclass(frozen=True)
class Curve:
    """A line over steps."""

    name: str
    points: Sequence[tuple[int, float | None]]
    color: str
    style: str = "solid"
    has_markers: bool = False
    run: RunFiles | None = None
    """If set, the figure can show the curve over tokens and time, too."""


def curve_figure(
    title: str,
    curves: Sequence[Curve],
    unit: str,
    *,
    is_wide: bool = False,
    height: int = 300,
    from_zero: bool = False,
    digits: str = "",
    shape: str = "linear",
    span: Sequence[float] | None = None,
    has_axes: bool = False,
) -> Figure | None:
    """Draw the curves; None if they have no value. With `has_axes`, buttons choose steps, tokens or
    time."""
    drawn = [curve for curve in curves if any(value is not None for _, value in curve.points)]
    if not drawn:
        return None
    data = []
    for curve in drawn:
        points = downsample(curve.points)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if curve.has_markers or len(points) == 1 else "lines",
                "name": plotly_text(curve.name),
                "x": [step for step, _ in points],
                "y": [value for _, value in points],
                "line": {"color": curve.color, "width": 1.8, "dash": curve.style, "shape": shape},
                "marker": {"size": 7},
                "hovertemplate": "%{y:.5~g}" if not digits else "%{y:,.0f}",
            }
        )
    layout = base_layout("step", unit, height=height)
    layout["showlegend"] = len(data) > 1
    if has_axes:
        runs = [curve.run for curve in drawn if curve.run is not None]
        layout |= _curve_axes(runs, [trace["x"] for trace in data])
        # Room for the buttons below plotly's own.
        layout["margin"]["t"] += _BUTTONS_PX
        layout["height"] += _BUTTONS_PX
    if from_zero:
        layout["yaxis"]["rangemode"] = "tozero"
    if digits:
        layout["yaxis"]["tickformat"] = digits
    if span is not None:
        layout["yaxis"]["range"] = list(span)
    return Figure(title=title, data=data, layout=layout, is_wide=is_wide)


def downsample(
    points: Sequence[tuple[int, float | None]], most: int = MAX_POINTS
) -> list[tuple[int, float | None]]:
    """Return at most about `most` points: the minimum and maximum of each interval, so that no
    spike is hidden, and one point that is not finite."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) * 2 // most)
    kept: list[tuple[int, float | None]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [(value, place) for place, (_, value) in enumerate(part) if value is not None]
        chosen = {place for place, (_, value) in enumerate(part) if value is None}
        chosen = {min(chosen)} if chosen else set()
        chosen |= {min(finite)[1], max(finite)[1]} if finite else set()
        kept += [part[place] for place in sorted(chosen)]
    return kept


def base_layout(x_title: str, y_title: str, *, height: int = 300) -> dict[str, Any]:
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": "#cbd5e1", "automargin": True}
    return {
        "height": height,
        "margin": {"l": 64, "r": 20, "t": 30, "b": 46},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": _FONT, "size": 12, "color": _TEXT},
        "hovermode": "x unified",
        "hoverlabel": {"align": "left"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {**axis, "title": {"text": x_title, "standoff": 8}},
        "yaxis": {**axis, "title": {"text": plotly_text(y_title), "standoff": 8}},
    }


def plotly_text(text: str) -> str:
    """Escape text for plotly.js, which interprets tags and entities; line breaks are kept."""
    return html.escape(text, quote=False).replace("\n", "<br>")


def _curve_axes(runs: Sequence[RunFiles], steps: Sequence[Sequence[int]]) -> dict[str, Any]:
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
