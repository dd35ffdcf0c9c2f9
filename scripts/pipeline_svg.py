"""A pipeline step as an SVG: one row per rank, one color per kind of action, one shade per
stage."""

import math
from xml.etree.ElementTree import Element, SubElement

from scripts.pipeline_chart import KINDS, Chart, tick_step
from scripts.svg import GRAY, INK, as_text, box, channels, document, is_light, text
from torchtitan_lite.parallel.pipeline_order import Span

# Colors that can be distinguished with any kind of color vision.
_COLORS = {"F": "#0072b2", "B": "#d55e00", "I": "#e69f00", "W": "#009e73"}
_WAITING = "#eceff3"
_EDGE, _LEFT, _TOP = 24, 104, 92
_ROW, _GAP = 34, 8
_LEAST_WIDTH, _MAX_WIDTH, _CELL = 640, 1800, 26
_FONT, _LEAST_FONT = 12, 6.5
_GLYPH = 0.6
"""Width of a digit, relative to the font size."""
_ORDINALS = ("a rank's first stage", "its second", "its third")


def as_svg(chart: Chart) -> str:
    """Return the drawing, without scripts and external fonts or files."""
    makespan, num_rows = chart.timeline.makespan, len(chart.timeline.rows)
    spans = [span for row in chart.timeline.rows for span in row if span.end > span.start]
    shortest = min(span.end - span.start for span in spans)
    pixels = min(max(_CELL / shortest, _LEAST_WIDTH / makespan), _MAX_WIDTH / makespan)
    bottom = _TOP + num_rows * (_ROW + _GAP)
    width, height = _LEFT + makespan * pixels + _EDGE, bottom + 76
    svg = document(width, height, f"{chart.schedule}: {chart.facts}")
    text(svg, _EDGE, 36, chart.schedule, size=20, weight="bold")
    text(svg, _EDGE, 58, chart.facts, size=13)
    text(svg, _EDGE, 76, chart.note, size=11, color=GRAY)
    fonts = _fonts(spans, pixels)
    for rank, row in enumerate(chart.timeline.rows):
        _draw_rank(svg, chart, rank, row, pixels, fonts)
    _axis(svg, makespan, pixels, bottom)
    _legend(svg, chart, bottom + 52)
    return as_text(svg)


def _fonts(spans: list[Span], pixels: float) -> dict[str, float]:
    """Return, by kind, the largest font size at which the numbers fit into all cells."""
    sizes: dict[str, float] = {}
    for span in spans:
        kind, digits = span.action.kind, len(str(span.action.microbatch))
        fitting = ((span.end - span.start) * pixels - 3) / (_GLYPH * digits)
        sizes[kind] = min(sizes.get(kind, _FONT), fitting)
    return sizes


def _draw_rank(
    svg: Element,
    chart: Chart,
    rank: int,
    row: tuple[Span, ...],
    pixels: float,
    fonts: dict[str, float],
) -> None:
    y = _TOP + rank * (_ROW + _GAP)
    stages = chart.stages_of(rank)
    text(svg, _EDGE, y + 15, f"rank {rank}", size=13, weight="bold")
    named = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    text(svg, _EDGE, y + 29, named, size=10, color=GRAY)
    box(svg, _LEFT, y, chart.timeline.makespan * pixels, _ROW, _WAITING)
    for span in row:
        x, width = _LEFT + span.start * pixels, (span.end - span.start) * pixels
        if width == 0:
            continue
        color = _shade(_COLORS[span.action.kind], chart.shade_of(span.action), chart.num_shades)
        # The white rim of wide cells would hide narrow ones.
        rim = min(1.0, width / 8)
        cell = box(svg, x + rim / 2, y, width - rim, _ROW, color)
        action = span.action
        SubElement(cell, "title").text = (
            f"{action}: stage {action.stage}, {KINDS[action.kind]}, microbatch "
            f"{action.microbatch}, time {span.start:g} to {span.end:g}"
        )
        size = fonts[action.kind]
        if size >= _LEAST_FONT:
            ink = INK if is_light(color) else "#ffffff"
            middle, base = x + width / 2, y + _ROW / 2 + size * 0.36
            text(svg, middle, base, str(action.microbatch), size=size, color=ink, anchor="middle")


def _axis(svg: Element, makespan: float, pixels: float, y: float) -> None:
    step = tick_step(44 / pixels)
    for time in range(0, math.floor(makespan) + 1, step):
        x = _LEFT + time * pixels
        box(svg, x - 0.5, y - 4, 1, 5, GRAY)
        text(svg, x, y + 14, str(time), size=10, color=GRAY, anchor="middle")
    text(svg, _EDGE, y + 14, "time", size=10, color=GRAY)


def _legend(svg: Element, chart: Chart, y: float) -> None:
    x = float(_EDGE)

    def entry(color: str, words: str) -> None:
        nonlocal x
        box(svg, x, y - 11, 14, 14, color)
        text(svg, x + 20, y, words, size=12)
        x += 20 + len(words) * 6.2 + 16

    for kind in chart.kinds:
        entry(_COLORS[kind], KINDS[kind])
    entry(_WAITING, "waiting")
    if chart.num_shades > 1:
        x += 8
        for shade in range(chart.num_shades):
            words = _ORDINALS[shade] if shade < len(_ORDINALS) else f"its {shade + 1}th"
            entry(_shade(GRAY, shade, chart.num_shades), words)


def _shade(color: str, place: int, num_shades: int) -> str:
    """Mix `color` with white, the more the higher the position."""
    part = 0.55 * place / max(1, num_shades - 1)
    return "#" + "".join(f"{round(c + (255 - c) * part):02x}" for c in channels(color))
