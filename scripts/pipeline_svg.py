"""A pipeline's step as an SVG: a row a rank, a color a kind of action, a shade a stage."""

import math
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from scripts.pipeline_chart import KINDS, Chart, tick_step
from torchtitan_lite.parallel.timeline import Span

# Colors that people with any kind of color vision tell apart.
_COLORS = {"F": "#0072b2", "B": "#d55e00", "I": "#e69f00", "W": "#009e73"}
_WAITING, _INK, _GRAY = "#eceff3", "#1f2430", "#667085"
_EDGE, _LEFT, _TOP = 24, 104, 92
_ROW, _GAP = 34, 8
_LEAST_WIDTH, _MOST_WIDTH, _CELL = 640, 1800, 26
_FONT, _LEAST_FONT = 12, 6.5
_GLYPH = 0.6
"""Width of a digit, in sizes of its font."""
_ORDINALS = ("a rank's first stage", "its second", "its third")


def as_svg(chart: Chart) -> str:
    """The drawing. It holds no script and asks for no font or file."""
    makespan, num_rows = chart.timeline.makespan, len(chart.timeline.rows)
    spans = [span for row in chart.timeline.rows for span in row if span.end > span.start]
    shortest = min(span.end - span.start for span in spans)
    pixels = min(max(_CELL / shortest, _LEAST_WIDTH / makespan), _MOST_WIDTH / makespan)
    bottom = _TOP + num_rows * (_ROW + _GAP)
    width, height = _LEFT + makespan * pixels + _EDGE, bottom + 76
    svg = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width:.0f} {height}",
            "width": f"{width:.0f}",
            "height": f"{height}",
            "font-family": "Helvetica, Arial, sans-serif",
        },
    )
    SubElement(svg, "title").text = f"{chart.schedule}: {chart.facts}"
    _box(svg, 0, 0, width, height, "#ffffff")
    _text(svg, _EDGE, 36, chart.schedule, size=20, weight="bold")
    _text(svg, _EDGE, 58, chart.facts, size=13)
    _text(svg, _EDGE, 76, chart.note, size=11, color=_GRAY)
    fonts = _fonts(spans, pixels)
    for rank, row in enumerate(chart.timeline.rows):
        _draw_rank(svg, chart, rank, row, pixels, fonts)
    _axis(svg, makespan, pixels, bottom)
    _legend(svg, chart, bottom + 52)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _fonts(spans: list[Span], pixels: float) -> dict[str, float]:
    """The size of the numbers in the cells of each kind: one with which all of them fit."""
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
    _text(svg, _EDGE, y + 15, f"rank {rank}", size=13, weight="bold")
    named = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    _text(svg, _EDGE, y + 29, named, size=10, color=_GRAY)
    _box(svg, _LEFT, y, chart.timeline.makespan * pixels, _ROW, _WAITING)
    for span in row:
        x, width = _LEFT + span.start * pixels, (span.end - span.start) * pixels
        if width == 0:
            continue
        color = _shade(_COLORS[span.action.kind], chart.shade_of(span.action), chart.num_shades)
        # The white rim of wide cells would hide narrow ones.
        rim = min(1.0, width / 8)
        cell = _box(svg, x + rim / 2, y, width - rim, _ROW, color)
        action = span.action
        SubElement(cell, "title").text = (
            f"{action}: stage {action.stage}, {KINDS[action.kind]}, microbatch "
            f"{action.microbatch}, time {span.start:g} to {span.end:g}"
        )
        size = fonts[action.kind]
        if size >= _LEAST_FONT:
            ink = _INK if _is_light(color) else "#ffffff"
            middle, base = x + width / 2, y + _ROW / 2 + size * 0.36
            _text(svg, middle, base, str(action.microbatch), size=size, color=ink, middle=True)


def _axis(svg: Element, makespan: float, pixels: float, y: float) -> None:
    step = tick_step(44 / pixels)
    for time in range(0, math.floor(makespan) + 1, step):
        x = _LEFT + time * pixels
        _box(svg, x - 0.5, y - 4, 1, 5, _GRAY)
        _text(svg, x, y + 14, str(time), size=10, color=_GRAY, middle=True)
    _text(svg, _EDGE, y + 14, "time", size=10, color=_GRAY)


def _legend(svg: Element, chart: Chart, y: float) -> None:
    x = float(_EDGE)

    def entry(color: str, words: str) -> None:
        nonlocal x
        _box(svg, x, y - 11, 14, 14, color)
        _text(svg, x + 20, y, words, size=12)
        x += 20 + len(words) * 6.2 + 16

    for kind in chart.kinds:
        entry(_COLORS[kind], KINDS[kind])
    entry(_WAITING, "waiting")
    if chart.num_shades > 1:
        x += 8
        for shade in range(chart.num_shades):
            words = _ORDINALS[shade] if shade < len(_ORDINALS) else f"its {shade + 1}th"
            entry(_shade(_GRAY, shade, chart.num_shades), words)


def _shade(color: str, place: int, num_shades: int) -> str:
    """`color` mixed with white, the more the later the place."""
    part = 0.55 * place / max(1, num_shades - 1)
    return "#" + "".join(f"{round(c + (255 - c) * part):02x}" for c in _channels(color))


def _is_light(color: str) -> bool:
    red, green, blue = _channels(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _box(svg: Element, x: float, y: float, width: float, height: float, color: str) -> Element:
    numbers = {"x": x, "y": y, "width": width, "height": height}
    attributes = {name: f"{number:.2f}" for name, number in numbers.items()}
    return SubElement(svg, "rect", {**attributes, "fill": color})


def _text(
    svg: Element,
    x: float,
    y: float,
    words: str,
    *,
    size: float,
    color: str = _INK,
    weight: str = "normal",
    middle: bool = False,
) -> None:
    attributes = {"x": f"{x:.2f}", "y": f"{y:.2f}", "font-size": f"{size:.1f}", "fill": color}
    if weight != "normal":
        attributes["font-weight"] = weight
    if middle:
        attributes["text-anchor"] = "middle"
    SubElement(svg, "text", attributes).text = words
