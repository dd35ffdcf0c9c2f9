"""Links between sections of the docs, and the length of the page about fault tolerance."""

import re
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGES = [*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md")]
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_MAX_WORDS = 2500
"""A user reads this page; what else is true is in the reference."""


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    counts: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.*)$", _CODE.sub("", text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names.add(f"{name}-{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return names


def test_anchors_are_those_of_github() -> None:
    page = "# A `b` c\n## One, two: [three](x.md)\n```\n# no\n```\n## A b c\n"
    assert anchors(page) == {"a-b-c", "one-two-three", "a-b-c-1"}


def test_links_point_to_sections_that_exist() -> None:
    broken = []
    for path in _PAGES:
        text = path.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
            page = path.parent / target if target else path
            if "://" in target or page.suffix != ".md" or not page.exists():
                continue
            if anchor not in anchors(page.read_text(encoding="utf-8")):
                broken.append(f"{path.relative_to(_ROOT)}: {target}#{anchor}")
    assert broken == []


def test_the_page_about_fault_tolerance_is_short() -> None:
    text = (_ROOT / "docs" / "fault_tolerance.md").read_text(encoding="utf-8")
    assert len(text.split()) < _MAX_WORDS
