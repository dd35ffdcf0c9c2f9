"""A plan as an SVG: the holders before and after, and the sources of each holder's part."""

from collections.abc import Sequence
from xml.etree.ElementTree import SubElement

from scripts.reshard_explanation import format_bytes, holders_of, traffic
from scripts.reshard_picture import Area, Patch, areas, patches, plane
from scripts.svg import GRAY, INK, as_text, box, document, is_light, text
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.distributed.redistribute import Layout, Plan
from torchtitan_lite.distributed.redistribute.planning.placements import Holder

# Neighbors in the list differ in lightness as well as in hue.
_COLORS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7b4fa3"),
    *("#8fd3a8", "#8c4a1f", "#a9c4f5", "#b3123f", "#c5d93c", "#3c4f8f", "#f5b7a0", "#4d6b2f"),
)
_PAPER, _LINE = "#f4f5f7", "#98a2b3"
_WIDTH, _EDGE = 1000, 28
_PANEL, _INSET, _COLUMNS = 420, 220, 4
_CHIP_WIDTH, _CHIP_HEIGHT = 24, 17
_GLYPH = 0.6
"""Width of a digit, relative to the font size."""
_MAX_INSETS, _MAX_AREAS = 16, 20_000


def as_svg(plan: Plan) -> str:
    """Return the drawing, without scripts and external fonts or files.

    Raises UserError if it would have too many boxes to be legible.
    """
    return as_text(_Drawing(plan).svg)


class _Drawing:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rows, self._columns = (max(1, length) for length in plane(plan.shape))
        self._color = {h: _COLORS[n % len(_COLORS)] for n, h in enumerate(holders_of(plan))}
        self._traffic = traffic(plan)
        held = [areas(layout, plan.shape) for layout in (plan.src, plan.dst)]
        shown = list(plan.dst.mesh.holders)
        if len(shown) > _MAX_INSETS:
            shown.sort(key=lambda holder: -self._traffic[holder].received)
        self._shown = shown[:_MAX_INSETS]
        by_holder = {holder: patches(plan, holder) for holder in self._shown}
        count = sum(map(len, held)) + sum(map(len, by_holder.values()))
        if count > _MAX_AREAS:
            raise UserError(
                f"The drawing would have {count:,} boxes, and at most {_MAX_AREAS:,} can be seen. "
                "Draw a smaller tensor, or one with smaller split factors."
            )
        aspect = min(max(self._rows / self._columns, 0.12), 1)
        panel, inset = _PANEL * aspect, _INSET * aspect
        insets_top = 164 + panel
        per_inset = inset + 58
        legend_top = insets_top + 46 + -(-len(self._shown) // _COLUMNS) * per_inset
        legend_rows = -(-len(self._color) // 16)
        shape = " x ".join(map(str, plan.shape)) or "scalar"
        title = f"{shape} {str(plan.dtype).removeprefix('torch.')}"
        self.svg = document(
            _WIDTH, legend_top + 60 + 26 * legend_rows, f"Redistribution of {title}"
        )
        self._define_hatch()
        moved = f"{format_bytes(plan.moved_bytes)} moved between holders"
        text(self.svg, _EDGE, 38, f"{title}: {moved}", size=20, weight="bold")
        text(self.svg, _EDGE, 60, self._note(), size=12, color=GRAY)
        right = _WIDTH - _EDGE - _PANEL
        self._panel(_EDGE, panel, "source", plan.src, held[0])
        self._panel(right, panel, "destination", plan.dst, held[1])
        self._arrow(_EDGE + _PANEL + 14, right - 14, 128 + panel / 2)
        words = "Where each holder's part of the destination comes from"
        if len(self._shown) < len(shown):
            words += f" (the {len(self._shown)} of {len(shown)} that receive most)"
        text(self.svg, _EDGE, insets_top + 10, words, size=15, weight="bold")
        step = (_WIDTH - 2 * _EDGE - _INSET) / (_COLUMNS - 1)
        for index, holder in enumerate(self._shown):
            row, column = divmod(index, _COLUMNS)
            x, y = _EDGE + column * step, insets_top + 32 + row * per_inset
            self._inset(x, y, inset, holder, by_holder[holder])
        self._legend(legend_top)

    def _note(self) -> str:
        ndim = len(self._plan.shape)
        if ndim > 2:
            return "Dim 0 runs down, dim 1 to the right; the other dims fall on each other."
        return "Dim 0 runs down, dim 1 to the right." if ndim == 2 else "Drawn as a row."

    def _define_hatch(self) -> None:
        pattern = SubElement(
            SubElement(self.svg, "defs"),
            "pattern",
            {"id": "stays", "width": "7", "height": "7", "patternUnits": "userSpaceOnUse"},
        )
        line = {"d": "M-1,8 L8,-1 M-1,1 L1,-1 M6,8 L8,6", "stroke-width": "1.6"}
        SubElement(pattern, "path", {**line, "stroke": "#ffffff", "stroke-opacity": "0.75"})

    def _panel(
        self, x: float, height: float, name: str, layout: Layout, held: dict[Area, list[Holder]]
    ) -> None:
        text(self.svg, x, 92, name.capitalize(), size=15, weight="bold")
        words = str(layout)
        size = min(12, _PANEL / (len(words) * 0.52))
        text(self.svg, x, 110, words, size=max(size, 7), color=GRAY)
        y = 122
        box(self.svg, x, y, _PANEL, height, _PAPER, stroke=_LINE)
        joins = len(layout.partial_axes) > 0
        for area, holders in held.items():
            left, top, across, down = self._pixels(area, x, y, _PANEL, height)
            color = self._color[holders[0]] if len(holders) == 1 else "#ffffff"
            cell = box(self.svg, left, top, across, down, color, stroke="#ffffff")
            cell.set("class", name)
            named = (" + " if joins else ", ").join(map(str, holders))
            SubElement(cell, "title").text = f"{named}: {_place(area)}"
            if len(holders) > 1:
                cell.set("stroke", _LINE)
                self._chips(left, top, across, down, holders, "+" if joins else "")
            else:
                self._label(left, top, across, down, str(holders[0]), color, 15)

    def _chips(
        self, x: float, y: float, width: float, height: float, holders: list[Holder], plus: str
    ) -> None:
        """Draw all holders of the same area, in rows that fit it; nothing if they do not fit."""
        per_row = max(1, int((width - 4) // (_CHIP_WIDTH + 3)))
        per_row = min(per_row, len(holders))
        rows = -(-len(holders) // per_row)
        across, down = _CHIP_WIDTH + 3, _CHIP_HEIGHT + 3
        scale = min(1, (width - 4) / (per_row * across), (height - 4) / (rows * down))
        if scale < 0.4:
            return
        across, down = across * scale, down * scale
        left = x + (width - per_row * across) / 2
        top = y + (height - rows * down) / 2
        for index, holder in enumerate(holders):
            row, column = divmod(index, per_row)
            color = self._color[holder]
            at = left + column * across, top + row * down
            size = (_CHIP_WIDTH * scale, _CHIP_HEIGHT * scale)
            box(self.svg, *at, *size, color, rx=f"{4 * scale:.1f}")
            self._label(*at, *size, f"{plus}{holder}", color, 11)

    def _arrow(self, left: float, right: float, y: float) -> None:
        path = f"M{left:.0f},{y:.0f} H{right - 12:.0f} m0,-7 l12,7 l-12,7 z"
        attributes = {"d": path, "fill": GRAY, "stroke": GRAY, "stroke-width": "3"}
        SubElement(self.svg, "path", attributes)
        middle = (left + right) / 2
        rounds = " and ".join(self._plan.rounds)
        words = "nothing moves" if self._plan.moved_bytes == 0 else rounds
        text(self.svg, middle, y - 14, words, size=11, color=GRAY, anchor="middle")

    def _inset(
        self, x: float, y: float, height: float, holder: Holder, parts: Sequence[Patch]
    ) -> None:
        color = self._color[holder]
        box(self.svg, x, y, _CHIP_WIDTH, _CHIP_HEIGHT, color, rx="4")
        self._label(x, y, _CHIP_WIDTH, _CHIP_HEIGHT, str(holder), color, 11)
        received, stays = self._traffic[holder].received, self._traffic[holder].stays
        words = [f"receives {format_bytes(received)}"] if received else []
        words += [f"keeps {format_bytes(stays)}"] if stays else []
        caption = ", ".join(words) or "begins as nothing"
        text(self.svg, x + _CHIP_WIDTH + 8, y + 13, caption, size=11.5)
        top = y + _CHIP_HEIGHT + 6
        box(self.svg, x, top, _INSET, height, _PAPER, stroke=_LINE)
        for patch in parts:
            self._patch(patch, self._pixels(patch.area, x, top, _INSET, height), holder)

    def _patch(self, patch: Patch, at: tuple[float, float, float, float], holder: Holder) -> None:
        x, y, width, height = at
        whole, begin = sum(count for _, count in patch.sources), x
        for source, count in patch.sources:
            across = width * count / whole
            color = self._color[source]
            band = box(self.svg, begin, y, across, height, color, stroke="#ffffff")
            band.set("stroke-width", "0.7")
            band.set("class", "part")
            SubElement(band, "title").text = f"{_place(patch.area)} from {source}"
            if source == holder:
                box(self.svg, begin, y, across, height, "url(#stays)")
            plus = "+" if patch.is_joined else ""
            self._label(begin, y, across, height, f"{plus}{source}", color, 12)
            begin += across
        if patch.is_joined:
            frame = box(self.svg, x + 0.75, y + 0.75, width - 1.5, height - 1.5, "none")
            frame.set("stroke", INK)
            frame.set("stroke-width", "1.5")

    def _legend(self, y: float) -> None:
        text(self.svg, _EDGE, y, "Holders", size=13, weight="bold")
        for index, (holder, color) in enumerate(self._color.items()):
            row, column = divmod(index, 16)
            x, top = _EDGE + 80 + column * 52, y - 12 + row * 26
            box(self.svg, x, top, 40, _CHIP_HEIGHT, color, rx="4")
            self._label(x, top, 40, _CHIP_HEIGHT, str(holder), color, 11)
        y += -(-len(self._color) // 16) * 26 + 6
        x = float(_EDGE)
        entries = [("plain", "comes from the holder of that color")]
        entries += [("stays", "is there already")] if self._any_stays() else []
        joins = "reduce" in self._plan.rounds
        entries += [("joined", f"+ contributions, joined by {self._plan.op}")] if joins else []
        for kind, words in entries:
            swatch = box(self.svg, x, y - 12, 28, 15, self._plain)
            if kind == "stays":
                box(self.svg, x, y - 12, 28, 15, "url(#stays)")
            elif kind == "joined":
                swatch.set("stroke", INK)
                swatch.set("stroke-width", "1.5")
            text(self.svg, x + 36, y, words, size=12)
            x += 36 + len(words) * 6.2 + 26

    @property
    def _plain(self) -> str:
        return next(iter(self._color.values()))

    def _any_stays(self) -> bool:
        return any(self._traffic[holder].stays for holder in self._shown)

    def _pixels(
        self, area: Area, x: float, y: float, width: float, height: float
    ) -> tuple[float, float, float, float]:
        across, down = width / self._columns, height / self._rows
        return (
            x + area.left * across,
            y + area.top * down,
            area.width * across,
            area.height * down,
        )

    def _label(
        self, x: float, y: float, width: float, height: float, words: str, color: str, most: float
    ) -> None:
        """Draw text in the middle of a box if it fits."""
        size = min(most, (width - 2) / (_GLYPH * len(words)), height * 0.85)
        if size >= 6.5:
            ink = INK if is_light(color) else "#ffffff"
            label = text(
                self.svg,
                x + width / 2,
                y + height / 2 + size * 0.36,
                words,
                size=size,
                color=ink,
                weight="bold",
                anchor="middle",
            )
            # An outline separates it from a hatch.
            label.set("stroke", color)
            label.set("stroke-width", "3")
            label.set("paint-order", "stroke")


def _place(area: Area) -> str:
    return (
        f"rows {area.top} to {area.top + area.height - 1}, columns {area.left} to "
        f"{area.left + area.width - 1}"
    )
