"""The figures of a report, as JSON for plotly.js. Pure.

Text from files is escaped here too, because plotly.js interprets a subset of HTML in names and
labels.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from torchtitan_lite.core.phases import TIME_NAMES
from torchtitan_lite.tools.report.comparison import COMPARED, NAMES, Comparison
from torchtitan_lite.tools.report.curves import (
    BUTTONS,
    MAX_POINTS,
    Curve,
    Figure,
    base_layout,
    curve_figure,
    plotly_text,
    time_unit,
)
from torchtitan_lite.tools.report.run_files import Goodput, RunFiles, Step
from torchtitan_lite.tools.report.timeline import KINDS, ROUTINE, Mark, RunTimeline

COLORS = (
    *("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#dc2626"),
    *("#ca8a04", "#db2777", "#4f46e5", "#65a30d"),
)
KIND_COLORS = {
    "compute": "#2563eb",
    "communication": "#60a5fa",
    "data": "#a78bfa",
    "checkpoint": "#0d9488",
    "quorum": "#facc15",
    "healing": "#84cc16",
    "compile": "#c084fc",
    "start": "#94a3b8",
    "between": "#cbd5e1",
    "end": "#64748b",
    "lost": "#dc2626",
    "idle": "#fb923c",
}
"""Colors by kind of time, in the order of the bar."""
_MARKERS = {
    "fault": ("x", "#dc2626", 12),
    "error": ("x-thin-open", "#7f1d1d", 12),
    "machine_fault": ("cross", "#7f1d1d", 12),
    "hang": ("hourglass", "#b91c1c", 12),
    "aborted": ("triangle-up", "#f97316", 11),
    "skipped": ("triangle-down", "#d97706", 11),
    "rolled_back": ("triangle-left", "#b45309", 11),
    "save_failed": ("square-x-open", "#dc2626", 11),
    "slow_rank": ("hexagon", "#a16207", 11),
    "restart": ("triangle-right", "#475569", 11),
    "resume": ("star", "#2563eb", 12),
    "healed": ("diamond", "#15803d", 12),
    "quorum": ("line-ns-open", "#7c3aed", 11),
    "saved": ("square", "#1d4ed8", 8),
    "validation": ("circle", "#0891b2", 8),
    "averaged": ("circle-open", "#64748b", 8),
    "other": ("pentagon", "#64748b", 9),
}
_SPAN_COLORS = {"starting": "#cbd5e1", "training": "#bbf7d0", "down": "#fecaca"}
_ABOVE, _BELOW = 0.3, -0.3
"""Offsets of routine marks from the middle of a lane, which is reserved for faults."""
_OFFSETS = {"saved": _BELOW, "validation": _ABOVE, "quorum": _BELOW, "averaged": _ABOVE}
_MAX_LINES = 10


def loss_figure(runs: Sequence[RunFiles]) -> Figure | None:
    """Draw training and validation loss."""
    curves = []
    for place, run in enumerate(runs):
        color = COLORS[place % len(COLORS)]
        name = run.label if len(runs) > 1 else "training"
        curves.append(Curve(name, _points(run.merged, "loss"), color, run=run))
        by_step: dict[int, float | None] = {}
        for event in run.events("validation"):
            loss = event.values.get("loss")
            if event.step is not None and isinstance(loss, int | float):
                by_step.setdefault(event.step, float(loss))
        if by_step:
            name = f"{run.label}, validation" if len(runs) > 1 else "validation"
            color = color if len(runs) > 1 else COLORS[1]
            points = sorted(by_step.items())
            curves.append(Curve(name, points, color, "dot", has_markers=True, run=run))
    return curve_figure(
        "Loss", curves, "loss (nats per token)", is_wide=True, height=380, has_axes=True
    )


def curve_figures(runs: Sequence[RunFiles]) -> list[Figure]:
    """Draw learning rate and gradient norm."""
    return _known(
        _merged("Gradient norm (before clipping)", runs, "grad_norm", "L2 norm", has_axes=True),
        _merged("Learning rate", runs, "lr", "learning rate", from_zero=True, has_axes=True),
    )


def speed_figures(runs: Sequence[RunFiles]) -> list[Figure]:
    """Draw throughput, MFU, step time, memory and replicas."""
    has_replicas = any((record["num_replicas"] or 1) > 1 for run in runs for record in run.merged)
    return _known(
        _merged("Throughput", runs, "tokens_per_second", "tokens/s", from_zero=True, digits="~s"),
        _merged(
            "Model FLOPs utilization", runs, "mfu", "MFU (%)", from_zero=True, factor=100
        ),
        _step_time(runs),
        _memory(runs),
        _merged("Goodput up to each step", runs, "goodput", "goodput (%)", factor=100,
                span=[0, 100]),
        _merged("Participating replicas", runs, "num_replicas", "replicas", from_zero=True,
                shape="hv") if has_replicas else None,
    )  # fmt: skip


def router_figures(runs: Sequence[RunFiles]) -> list[Figure]:
    """Load of the busiest expert by router, and idle experts. Empty for dense models."""
    loaded = [run for run in runs if any(record.router_load for record in run.merged)]
    if not loaded:
        return []
    figures = [_merged("Idle experts", runs, "idle_experts", "experts", from_zero=True)]
    label = "busiest expert (multiple of a fair share)"
    if len(runs) > 1:
        curves = [
            Curve(
                run.label,
                [
                    (record.step, max(record.router_load.values()))
                    for record in run.merged
                    if record.router_load
                ],
                COLORS[place % len(COLORS)],
            )
            for place, run in enumerate(runs)
        ]
        return _known(curve_figure("Router load, the most uneven router", curves, label), *figures)
    (run,) = loaded
    names = list(dict.fromkeys(name for record in run.merged for name in record.router_load))
    if len(names) > _MAX_LINES:
        return _known(_router_heatmap(run, names, label), *figures)
    curves = [
        Curve(
            name,
            [
                (record.step, record.router_load[name])
                for record in run.merged
                if name in record.router_load
            ],
            COLORS[place % len(COLORS)],
        )
        for place, name in enumerate(names)
    ]
    return _known(curve_figure("Router load", curves, label), *figures)


def goodput_figure(runs: Sequence[RunFiles]) -> Figure | None:
    """Draw wall time by cause, one bar per replica."""
    rows = [
        (account_label(run, account, len(runs) > 1), account)
        for run in runs
        for account in run.goodput
        if account.wall_s > 0
    ]
    if not rows:
        return None
    rows.reverse()
    unit, per_unit = time_unit(max(account.wall_s for _, account in rows))
    data = []
    for place, kind in enumerate(ordered_kinds([account for _, account in rows])):
        seconds = [account.seconds.get(kind, 0.0) for _, account in rows]
        shares = [s / account.wall_s for s, (_, account) in zip(seconds, rows, strict=True)]
        name = kind_name(kind)
        hover = [f"{name}: {s:,.1f} s, {p:.1%}" for s, p in zip(seconds, shares, strict=True)]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plotly_text(name),
                "y": [plotly_text(label) for label, _ in rows],
                "x": [s / per_unit for s in seconds],
                "text": [f"{p:.0%}" if p >= 0.04 else "" for p in shares],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "hovertext": [plotly_text(hover_text) for hover_text in hover],
                "hovertemplate": "%{y}<br>%{hovertext}<extra></extra>",
                "marker": {"color": KIND_COLORS.get(kind, COLORS[place % len(COLORS)])},
            }
        )
    layout = base_layout(f"wall time ({unit})", "", height=130 + 46 * len(rows))
    layout |= {"barmode": "stack", "hovermode": "closest", "bargap": 0.35}
    layout["yaxis"] |= {"automargin": True, "type": "category"}
    layout["legend"] |= {"traceorder": "normal"}
    return Figure(title="Wall time by cause", data=data, layout=layout, is_wide=True)


def timeline_figure(run: RunFiles, timeline: RunTimeline) -> Figure | None:
    """Draw generations and events over wall time, with a button to switch to steps; over steps only
    if there are no times."""
    if not timeline.marks and not timeline.spans:
        return None
    places = {lane: len(timeline.lanes) - 1 - place for place, lane in enumerate(timeline.lanes)}
    first, unit, per_unit = timeline.first_time, "s", 1.0
    times = [span.end for span in timeline.spans] + [
        mark.time for mark in timeline.marks if mark.time is not None
    ]
    if first is not None:
        unit, per_unit = time_unit(max(times) - first)

    def elapsed(time: float | None) -> float | None:
        return None if time is None or first is None else round((time - first) / per_unit, 6)

    data: list[dict[str, Any]] = []
    by_time: list[Any] = []
    by_step: list[Any] = []
    bases: tuple[list[Any], list[Any]] = ([], [])
    for kind, color in _SPAN_COLORS.items():
        spans = [span for span in timeline.spans if span.kind == kind]
        if not spans:
            continue
        by_time.append([(span.end - span.start) / per_unit for span in spans])
        by_step.append([span.last_step - span.first_step for span in spans])
        bases[0].append([elapsed(span.start) for span in spans])
        bases[1].append([span.first_step for span in spans])
        hover = [
            f"{span.kind} for {duration(span.end - span.start)}, from {format_utc(span.start)}"
            + (f", steps {span.first_step} to {span.last_step}" if span.kind == "training" else "")
            for span in spans
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "y": [places[span.lane] for span in spans],
                "width": 0.36,
                "marker": {"color": color},
                "text": [plotly_text(hover_text) for hover_text in hover],
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    for kind, name in KINDS.items():
        marks = [mark for mark in timeline.marks if mark.kind == kind]
        if not marks:
            continue
        symbol, color, size = _MARKERS[kind]
        by_time.append([elapsed(mark.time) for mark in marks])
        by_step.append([mark.step for mark in marks])
        for base in bases:
            base.append(None)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "y": [places[mark.lane] + _OFFSETS.get(kind, 0.0) for mark in marks],
                "text": [plotly_text(_mark_hover(mark)) for mark in marks],
                "hovertemplate": f"<b>{name}</b><br>%{{text}}<extra></extra>",
                "marker": {
                    "symbol": symbol,
                    "color": color,
                    "size": size,
                    "line": {"width": 1 if kind in ROUTINE or kind == "error" else 0.5},
                },
            }
        )
    shown, base = (by_step, bases[1]) if first is None else (by_time, bases[0])
    for trace, x, begin in zip(data, shown, base, strict=True):
        trace["x"] = x
        if begin is not None:
            trace["base"] = begin
    by_time_title, by_step_title = f"time since the first start ({unit})", "step"
    layout = base_layout(by_step_title if first is None else by_time_title, "")
    lanes_px, below_px = 62 * len(timeline.lanes), 62 + 20 * -(-len(data) // 5)
    layout |= {
        "height": 56 + lanes_px + below_px,
        "margin": {"l": 64, "r": 20, "t": 56, "b": below_px},
        "hovermode": "closest",
        "barmode": "overlay",
    }
    layout["legend"] |= {"y": -52 / lanes_px, "yanchor": "top"}
    layout["yaxis"] |= {
        "tickmode": "array",
        "tickvals": list(places.values()),
        "ticktext": [plotly_text(lane) for lane in places],
        "range": [-0.6, len(places) - 0.4],
        "automargin": True,
        "showgrid": False,
        "fixedrange": True,
    }
    if first is not None:
        layout["updatemenus"] = [_axis_buttons(by_time, by_step, bases, by_time_title)]
    note = f"{timeline.num_thinned} events of frequent kinds are not drawn." * bool(
        timeline.num_thinned
    )
    return Figure(title=run.label, data=data, layout=layout, note=note, is_wide=True)


def difference_figure(comparisons: Sequence[Comparison]) -> Figure | None:
    """Draw relative differences from the first run over steps, on a logarithmic axis."""
    curves = []
    for place, comparison in enumerate(comparisons):
        color = COLORS[(place + 1) % len(COLORS)]
        for name in COMPARED:
            points = [
                (
                    difference.step,
                    difference.relative if 0 < difference.relative < math.inf else None,
                )
                for difference in comparison.differences[name]
            ]
            style = "solid" if name == "loss" else "dot"
            label = NAMES[name] if len(comparisons) == 1 else f"{comparison.other}, {NAMES[name]}"
            curves.append(Curve(label, points, color, style))
    figure = curve_figure(
        "Relative difference from the first run", curves, "relative difference", is_wide=True
    )
    if figure is None:
        return None
    layout = {**figure.layout, "yaxis": figure.layout["yaxis"] | _LOG_AXIS}
    return Figure(
        title=figure.title,
        data=figure.data,
        layout=layout,
        note="|a - b| / max(|a|, |b|). Steps with equal values have no point.",
        is_wide=True,
    )


_LOG_AXIS = {"type": "log", "exponentformat": "power", "dtick": 1}


def ordered_kinds(accounts: Sequence[Goodput]) -> list[str]:
    """Return the kinds of time with nonzero duration, in the order of the bar; unknown ones
    last."""
    used = {
        kind for account in accounts for kind, seconds in account.seconds.items() if seconds > 0
    }
    return [*(kind for kind in KIND_COLORS if kind in used), *sorted(used - KIND_COLORS.keys())]


def kind_name(kind: str) -> str:
    """Return the display name of a kind of time."""
    return TIME_NAMES.get(kind, kind.replace("_", " "))


def account_label(run: RunFiles, account: Goodput, is_named: bool) -> str:
    """Return the replica, prefixed by its run if there are several."""
    own = "all ranks" if account.replica is None else f"replica {account.replica}"
    if not is_named:
        return own
    return run.label if account.replica is None else f"{run.label}, {own}"


def duration(seconds: float) -> str:
    """Format a duration, such as 41.2 s, 12 min 03 s, 5 h 12 min."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour} h {minute:02} min" if hour else f"{minute} min {second:02} s"


def format_utc(time: float) -> str:
    """Format a time, such as 2026-05-01 12:00:00 UTC."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _mark_hover(mark: Mark) -> str:
    parts = [] if mark.step is None else [f"step {mark.step}"]
    parts += [] if mark.time is None else [format_utc(mark.time)]
    return f"{mark.lane}, {', '.join(parts)}\n{mark.text}" if parts else mark.text


def _axis_buttons(
    by_time: list[Any], by_step: list[Any], bases: tuple[list[Any], list[Any]], title: str
) -> dict[str, Any]:
    def button(label: str, x: list[Any], base: list[Any], axis: str) -> dict[str, Any]:
        changes = {"x": x, "base": base}
        layout = {"xaxis.title.text": axis, "xaxis.autorange": True}
        return {"label": label, "method": "update", "args": [changes, layout]}

    return {
        **BUTTONS,
        "buttons": [
            button("Wall time", by_time, bases[0], title),
            button("Steps", by_step, bases[1], "step"),
        ],
    }


def _step_time(runs: Sequence[RunFiles]) -> Figure | None:
    if len(runs) > 1:
        return _merged("Step time", runs, "step_time_s", "s", from_zero=True)
    parts = {
        "step_time_s": "whole step",
        "data_time_s": "waiting for data",
        "checkpoint_stall_s": "checkpoint stall",
    }
    curves = [
        Curve(label, _points(runs[0].merged, name), COLORS[place])
        for place, (name, label) in enumerate(parts.items())
    ]
    return curve_figure("Step time", curves, "s", from_zero=True)


def _memory(runs: Sequence[RunFiles]) -> Figure | None:
    """Draw the peak memory of each rank that writes metrics."""
    streams = [(run, stream) for run in runs for stream in run.streams]
    curves = []
    for place, (run, stream) in enumerate(streams):
        label = stream.label if len(runs) == 1 else run.label
        if len(runs) > 1 and len(run.streams) > 1:
            label = f"{run.label}, {stream.label}"
        points = _with_gaps(_points(stream.committed(), "memory_gib"))
        curves.append(Curve(label, points, COLORS[place % len(COLORS)]))
    return curve_figure("Peak memory per rank", curves, "GiB", from_zero=True)


def _router_heatmap(run: RunFiles, names: Sequence[str], label: str) -> Figure | None:
    steps = run.merged[:: max(1, -(-len(run.merged) // (MAX_POINTS // 10)))]
    layout = base_layout("step", "", height=140 + 14 * len(names))
    layout["yaxis"] |= {"automargin": True, "type": "category"}
    layout |= {"hovermode": "closest"}
    trace = {
        "type": "heatmap",
        "x": [step.step for step in steps],
        "y": [plotly_text(name) for name in names],
        "z": [[step.router_load.get(name) for step in steps] for name in names],
        "colorscale": "YlOrRd",
        "colorbar": {"title": {"text": "multiple", "side": "right"}},
        "hovertemplate": "%{y}<br>step %{x}: %{z:.2f}<extra></extra>",
    }
    return Figure(title=f"Router load: {label}", data=[trace], layout=layout, is_wide=True)


def _merged(
    title: str,
    runs: Sequence[RunFiles],
    name: str,
    unit: str,
    *,
    factor: float = 1.0,
    from_zero: bool = False,
    digits: str = "",
    shape: str = "linear",
    span: Sequence[float] | None = None,
    has_axes: bool = False,
) -> Figure | None:
    """Draw one curve per run."""
    curves = [
        Curve(run.label, _points(run.merged, name, factor), COLORS[place % len(COLORS)], run=run)
        for place, run in enumerate(runs)
    ]
    return curve_figure(
        title,
        curves,
        unit,
        from_zero=from_zero,
        digits=digits,
        shape=shape,
        span=span,
        has_axes=has_axes,
    )


def _with_gaps(points: Sequence[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """Insert a point without value into each range of missing steps, to interrupt the line."""
    result: list[tuple[int, float | None]] = []
    for step, value in points:
        if result and step > result[-1][0] + 1:
            result.append((step - 1, None))
        result.append((step, value))
    return result


def _points(
    steps: Sequence[Step], name: str, factor: float = 1.0
) -> list[tuple[int, float | None]]:
    return [
        (step.step, None if (value := step[name]) is None else value * factor) for step in steps
    ]


def _known(*figures: Figure | None) -> list[Figure]:
    return [figure for figure in figures if figure is not None]
