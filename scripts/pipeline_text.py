"""A pipeline step as text that fits a terminal: labeled actions over several bands of time or,
if that needs too many, one letter per time slice."""

import math
from itertools import groupby

from scripts.pipeline_chart import KINDS, Chart, tick_step
from torchtitan_lite.parallel.pipeline_order import Span

_MAX_LINES = 60
_WAITING = "."
# Black on a light background, in the standard 256 terminal colors.
_COLORS = {"F": "30;48;5;111", "B": "30;48;5;215", "I": "30;48;5;222", "W": "30;48;5;115"}
_DIM = "2"


def as_text(chart: Chart, num_columns: int, *, in_color: bool) -> str:
    """Return the drawing, at most `num_columns` wide if that is at least 40."""
    names = [f"rank {rank}" for rank in range(len(chart.timeline.rows))]
    margin = max(map(len, names)) + 2
    room = max(num_columns, 40) - margin
    scale = _columns_per_unit(chart)
    band = room // scale * scale
    num_bands = math.ceil(chart.timeline.makespan * scale / band) if band else math.inf
    is_scaled = num_bands * (len(names) + 2) > _MAX_LINES
    if is_scaled:
        scale = room / chart.timeline.makespan
        band = room
    lines = [f"{chart.schedule}: {chart.facts}", f"Costs: {chart.note}"]
    draw = _letters if is_scaled else _labels
    rows = [draw(chart, row, scale) for row in chart.timeline.rows]
    axis = _axis(chart.timeline.makespan, scale, band)
    for first in range(0, len(rows[0]), band):
        part = slice(first, first + band)
        lines += ["", "time".ljust(margin) + axis[part].rstrip()]
        for name, row in zip(names, rows, strict=True):
            lines.append(name.ljust(margin) + _painted(row[part], in_color))
    return "\n".join([*lines, "", *_legend(chart, is_scaled, 1 / scale)])


Cell = tuple[str, str]
"""A character, and the kind of its action or `_WAITING`."""


def _label(chart: Chart, span: Span) -> str:
    action = span.action
    return str(action) if chart.num_shades > 1 else f"{action.kind}{action.microbatch}"


def _columns_per_unit(chart: Chart) -> int:
    """Return the columns per unit of time, so that each action has room for its label and a
    blank."""
    return math.ceil(
        max(
            (len(_label(chart, span)) + 1) / (span.end - span.start)
            for row in chart.timeline.rows
            for span in row
            if span.end > span.start
        )
    )


def _labels(chart: Chart, row: tuple[Span, ...], scale: float) -> list[Cell]:
    cells: list[Cell] = [(_WAITING, _WAITING)] * round(chart.timeline.makespan * scale)
    for span in row:
        start, end = round(span.start * scale), round(span.end * scale)
        text = (_label(chart, span).ljust(end - start - 1, "-") + " ")[: end - start]
        cells[start:end] = [(character, span.action.kind) for character in text]
    return cells


def _letters(chart: Chart, row: tuple[Span, ...], scale: float) -> list[Cell]:
    """Return the main activity of the rank in each column."""
    columns: list[dict[str, float]] = [{} for _ in range(round(chart.timeline.makespan * scale))]
    for span in row:
        start, end = span.start * scale, span.end * scale
        for column in range(int(start), min(math.ceil(end), len(columns))):
            part = min(end, column + 1) - max(start, column)
            times = columns[column]
            times[span.action.kind] = times.get(span.action.kind, 0) + part
    letters = [
        max(times, key=times.__getitem__) if sum(times.values()) >= 0.5 else _WAITING
        for times in columns
    ]
    return [(letter, letter) for letter in letters]


def _axis(makespan: float, scale: float, band: int) -> str:
    """Return time labels above the columns, each within its band."""
    axis = [" "] * round(makespan * scale)
    for time in range(0, math.ceil(makespan), tick_step((len(f"{makespan:.0f}") + 2) / scale)):
        at, text = round(time * scale), str(time)
        if at // band == (at + len(text) - 1) // band and at + len(text) <= len(axis):
            axis[at : at + len(text)] = text
    return "".join(axis)


def _painted(cells: list[Cell], in_color: bool) -> str:
    if not in_color:
        return "".join(character for character, _ in cells).rstrip()
    painted = ""
    for kind, group in groupby(cells, key=lambda cell: cell[1]):
        text = "".join(character for character, _ in group)
        painted += f"\x1b[{_COLORS.get(kind, _DIM)}m{text}\x1b[0m"
    return painted


def _legend(chart: Chart, is_scaled: bool, unit: float) -> list[str]:
    kinds = [f"{kind} {KINDS[kind]}" for kind in chart.kinds]
    lines = ["; ".join([*kinds, f"{_WAITING} waiting"])]
    if is_scaled:
        lines.append(
            f"Too long for labels: a letter is {unit:.3g} of time. --svg draws each action."
        )
    elif chart.num_shades > 1:
        lines.append("2F3 is stage 2, forward, microbatch 3")
    else:
        lines.append("F3 is forward, microbatch 3; the stage has the number of its rank")
    return lines
