"""Elements of SVG drawings: the document, boxes, text."""

from typing import Literal
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

INK, GRAY = "#1f2430", "#667085"


def document(width: float, height: float, title: str) -> Element:
    """Return a white page, without external fonts or files."""
    svg = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width:.0f} {height:.0f}",
            "width": f"{width:.0f}",
            "height": f"{height:.0f}",
            "font-family": "Helvetica, Arial, sans-serif",
        },
    )
    SubElement(svg, "title").text = title
    box(svg, 0, 0, width, height, "#ffffff")
    return svg


def as_text(svg: Element) -> str:
    """Return the document as text."""
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def box(
    svg: Element, x: float, y: float, width: float, height: float, color: str, **more: str
) -> Element:
    """Return a filled box; `more` are further attributes, with _ for -."""
    numbers = {"x": x, "y": y, "width": width, "height": height}
    attributes = {name: f"{number:.2f}" for name, number in numbers.items()}
    more_attributes = {name.replace("_", "-"): value for name, value in more.items()}
    return SubElement(svg, "rect", {**attributes, "fill": color, **more_attributes})


def text(
    svg: Element,
    x: float,
    y: float,
    words: str,
    *,
    size: float,
    color: str = INK,
    weight: str = "normal",
    anchor: Literal["start", "middle", "end"] = "start",
) -> Element:
    """Return text whose baseline begins, ends or has its middle at (x, y)."""
    attributes = {"x": f"{x:.2f}", "y": f"{y:.2f}", "font-size": f"{size:.1f}", "fill": color}
    if weight != "normal":
        attributes["font-weight"] = weight
    if anchor != "start":
        attributes["text-anchor"] = anchor
    element = SubElement(svg, "text", attributes)
    element.text = words
    return element


def is_light(color: str) -> bool:
    """Whether dark words are easier to read on a color such as #0072b2."""
    red, green, blue = channels(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def channels(color: str) -> tuple[int, int, int]:
    """Return red, green and blue of a color such as #0072b2, from 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
