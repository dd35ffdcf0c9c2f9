"""Goodput over the number of ranks, as SVG: a line for each strategy."""

import math
from collections.abc import Sequence
from html import escape

from torchtitan_lite.tools.failure_model.simulation import Prediction
from torchtitan_lite.tools.failure_model.strategies import Strategy

_WIDTH, _HEIGHT = 960, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 290, 50, 56
_LABEL_HEIGHT = 17
_TICK_WIDTH = 58
# Colors that can be distinguished with any kind of color vision.
_COLORS = {
    "restart": "#d55e00",
    "torchft": "#cc79a7",
    "replicas": "#0072b2",
    "spares": "#e69f00",
    "buddies": "#009e73",
}
_DASHES = {"torchft": "6 4", "spares": "2 3"}
"""Strategies whose lines may lie on others."""


def goodput_picture(predictions: Sequence[Prediction], title: str) -> str:
    """Return the drawing of predictions for several numbers of ranks."""
    sizes = sorted({prediction.num_ranks for prediction in predictions})
    low = min(prediction.shares.goodput for prediction in predictions)
    bottom = max(0.0, math.floor(low * 10 - 1e-9) / 10)
    first, last = math.log(sizes[0]), math.log(max(sizes[-1], sizes[0] * 2))

    def x(num_ranks: int) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        return _LEFT + (math.log(num_ranks) - first) / (last - first) * width

    def y(goodput: float) -> float:
        height = _HEIGHT - _TOP - _BOTTOM
        return _TOP + (1 - goodput) / (1 - bottom) * height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="15">{escape(title)}</text>',
    ]
    for tenth in range(round(bottom * 10), 11):
        height, right = y(tenth / 10), _WIDTH - _RIGHT
        parts += [
            f'<line x1="{_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}" '
            'stroke="#e2e8f0"/>',
            f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{tenth * 10} %</text>',
        ]
    left = math.inf
    for num_ranks in reversed(sizes):
        place = x(num_ranks)
        parts.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM + 5}" stroke="#e2e8f0"/>'
        )
        if left - place >= _TICK_WIDTH:
            left = place
            parts.append(
                f'<text x="{place:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">'
                f"{num_ranks:,}</text>"
            )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">number of ranks</text>'
    )
    ends: list[tuple[float, Strategy, float]] = []
    for strategy in dict.fromkeys(prediction.strategy for prediction in predictions):
        points = sorted(
            (prediction.num_ranks, prediction.shares.goodput)
            for prediction in predictions
            if prediction.strategy == strategy
        )
        color, dash = _COLORS[strategy.name], _DASHES.get(strategy.name)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        line = " ".join(f"{x(ranks):.1f},{y(goodput):.1f}" for ranks, goodput in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.5"{dashed}/>'
        )
        parts += [
            f'<circle cx="{x(ranks):.1f}" cy="{y(goodput):.1f}" r="3.5" fill="{color}">'
            f"<title>{escape(strategy.title)}, {ranks:,} ranks: {goodput:.2%}</title></circle>"
            for ranks, goodput in points
        ]
        ends.append((y(points[-1][1]), strategy, points[-1][1]))
    parts += _labels(ends, x(sizes[-1]))
    return "\n".join([*parts, "</svg>\n"])


def _labels(ends: Sequence[tuple[float, Strategy, float]], from_x: float) -> list[str]:
    """Name the lines at their ends, without overlaps."""
    place, labels = -math.inf, []
    for end, strategy, goodput in sorted(ends, key=lambda line_end: line_end[0]):
        place = max(end, place + _LABEL_HEIGHT)
        color = _COLORS[strategy.name]
        labels += [
            f'<line x1="{from_x + 6:.1f}" x2="{from_x + 22:.1f}" y1="{end:.1f}" '
            f'y2="{place:.1f}" stroke="{color}"/>',
            f'<text x="{from_x + 26:.1f}" y="{place + 4:.1f}" fill="{color}">'
            f"{goodput * 100:.1f} % {escape(strategy.title)}</text>",
        ]
    return labels
