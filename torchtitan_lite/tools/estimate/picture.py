"""A picture of memory over a step, as SVG: areas by kind, stacked."""

from collections.abc import Sequence
from html import escape

from torchtitan_lite.tools.estimate.estimate import Estimate
from torchtitan_lite.tools.estimate.extrapolation import Point
from torchtitan_lite.tools.estimate.memory import KINDS, Kind
from torchtitan_lite.tools.estimate.text import mesh_text

_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 50, 60
_GIB, _MIB = 2**30, 2**20
_COLORS: dict[Kind, str] = {
    "weights": "#2563eb",
    "optimizer": "#0891b2",
    "gradients": "#16a34a",
    "buffers": "#ca8a04",
    "activations": "#ea580c",
    "logits": "#9333ea",
}


def memory_picture(estimate: Estimate) -> str:
    """Return the SVG of the traced rank with the highest peak."""
    rank = estimate.fullest
    points = rank.points
    top = max(rank.peak_bytes, 1.0)
    in_gib = top >= _GIB
    unit, unit_bytes = ("GiB", _GIB) if in_gib else ("MiB", _MIB)
    step = _tick(top / unit_bytes)
    limit = step * unit_bytes * (int(top / unit_bytes / step) + 1)
    last = max(point.position for point in points) or 1.0

    def x(position: float) -> float:
        return _LEFT + position / last * (_WIDTH - _LEFT - _RIGHT)

    def y(num_bytes: float) -> float:
        return _HEIGHT - _BOTTOM - num_bytes / limit * (_HEIGHT - _TOP - _BOTTOM)

    title = (
        f"{estimate.model} on {estimate.world_size:,} x {estimate.device}, "
        f"{mesh_text(estimate.degrees)}: rank {rank.rank}, peak {top / unit_bytes:,.1f} {unit}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for index in range(round(limit / unit_bytes / step) + 1):
        height = y(index * step * unit_bytes)
        parts += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}" '
            'stroke="#e2e8f0"/>',
            f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">'
            f"{index * step:g} {unit}</text>",
        ]
    parts += _areas(points, x, y)
    parts += _phases(points, x)
    peak = rank.peak
    parts.append(
        f'<circle cx="{x(peak.position):.1f}" cy="{y(top):.1f}" r="4" fill="none" '
        'stroke="#dc2626" stroke-width="2"/>'
    )
    for index, kind in enumerate(reversed(KINDS)):
        height = _TOP + 20 * index
        parts += [
            f'<rect x="{_WIDTH - _RIGHT + 16}" y="{height}" width="12" height="12" '
            f'fill="{_COLORS[kind]}"/>',
            f'<text x="{_WIDTH - _RIGHT + 34}" y="{height + 10}">{kind}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def _areas(points: Sequence[Point], x, y) -> list[str]:
    below = [0.0] * len(points)
    areas = []
    for kind in KINDS:
        above = [
            low + max(0.0, point.bytes[kind]) for low, point in zip(below, points, strict=True)
        ]
        edge = [f"{x(p.position):.1f},{y(b):.1f}" for p, b in zip(points, above, strict=True)]
        back = [f"{x(p.position):.1f},{y(b):.1f}" for p, b in zip(points, below, strict=True)]
        outline = " ".join([*edge, *reversed(back)])
        areas.append(f'<polygon points="{outline}" fill="{_COLORS[kind]}" fill-opacity="0.85"/>')
        below = above
    return areas


def _phases(points: Sequence[Point], x) -> list[str]:
    """Mark where forward, backward, reduction and optimizer begin."""
    elements, before = [], ""
    at = -100.0
    for point in points:
        if point.phase == before or point.phase == "start":
            continue
        before = point.phase
        place = x(point.position)
        elements.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM + 6}" '
            'stroke="#475569" stroke-dasharray="3 3"/>'
        )
        row = 0 if place - at > 60 else 14
        at = place
        elements.append(
            f'<text x="{place + 3:.1f}" y="{_HEIGHT - _BOTTOM + 18 + row}" fill="#475569">'
            f"{escape(point.phase)}</text>"
        )
    return elements


def _tick(top: float) -> float:
    """Return a round distance of the lines, for four to ten of them."""
    size = 10.0 ** (len(str(int(top))) - 1) if top >= 1 else 0.1
    for factor in (0.1, 0.2, 0.5, 1.0):
        if top / (size * factor) <= 8:
            return size * factor
    return size * 2
