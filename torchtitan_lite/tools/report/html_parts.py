"""Parts of the page of a report: its style and script, tables, and text and numbers as HTML."""

import html
from collections.abc import Sequence
from typing import Any

from torchtitan_lite.tools.report.json_lines import encodable

_UNBROKEN = 32
"""Maximum length of cells that stay on one line."""


STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f1f5f9; color: #1e293b; line-height: 1.45;
  font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 25px; margin: 0 0 2px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 34px 0 12px; padding-bottom: 6px; border-bottom: 2px solid #cbd5e1; }
h3 { font-size: 14px; margin: 0 0 4px; color: #334155; font-weight: 600; }
.sub { color: #64748b; margin: 0 0 16px; }
nav { margin: 0 0 18px; display: flex; flex-wrap: wrap; gap: 6px; }
nav a { color: #1d4ed8; text-decoration: none; background: #fff; border: 1px solid #dbe3ee;
  border-radius: 999px; padding: 3px 12px; font-size: 13px; }
nav a:hover { background: #eff6ff; }
.card { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; padding: 14px 16px;
  box-shadow: 0 1px 2px rgb(15 23 42 / 5%); min-width: 0; margin-bottom: 14px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px 18px;
  margin: 10px 0 0; }
.facts div { min-width: 0; }
.facts dt { color: #64748b; font-size: 12px; }
.facts dd { margin: 0; font-size: 18px; font-weight: 600; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
.facts small { display: block; font-size: 12px; font-weight: 400; color: #64748b; }
.run-name { font-size: 16px; font-weight: 650; overflow-wrap: anywhere; }
.path { color: #64748b; font-size: 12px; font-family: ui-monospace, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; }
.grid { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 14px; }
.grid .card { margin: 0; }
.below { margin-top: 14px; }
.wide { grid-column: 1 / -1; }
@media (max-width: 900px) { .grid { grid-template-columns: minmax(0, 1fr); } }
.note { color: #64748b; font-size: 12.5px; margin: 4px 0 0; }
.warn { background: #fffbeb; border-color: #fcd34d; }
.bad { color: #b91c1c; font-weight: 600; } .good { color: #15803d; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: #64748b; font-weight: 600; border-bottom: 1px solid #cbd5e1;
  padding: 5px 12px 5px 0; white-space: nowrap; }
td { padding: 5px 12px 5px 0; border-bottom: 1px solid #f1f5f9; vertical-align: top;
  overflow-wrap: break-word; }
td.k { white-space: nowrap; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
pre { margin: 8px 0 0; padding: 12px; background: #f8fafc; border: 1px solid #e2e8f0; 
  border-radius: 8px; font: 12px/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
  overflow: auto; max-height: 560px; }
pre.columns { columns: 3 330px; max-height: none; overflow: visible; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.fit { width: auto; min-width: 50%; } .fit td, .fit th { padding-right: 40px; }
details table { margin-top: 6px; }
summary { cursor: pointer; font-weight: 600; color: #334155; }
footer { color: #94a3b8; font-size: 12px; margin-top: 30px; }
"""


SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
for (const [id, figure] of Object.entries(figures)) {
  Plotly.newPlot(id, figure.data, figure.layout,
    {responsive: true, displaylogo: false, displayModeBar: "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]});
}
"""


def html_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int | None = None
) -> str:
    """Return a table of text; columns from `numbers_from` on are numbers."""
    start = len(heads) if numbers_from is None else numbers_from

    def cell(tag: str, place: int, text: str) -> str:
        kind = ' class="n"' if place >= start else ""
        if not kind and len(text) <= _UNBROKEN:
            kind = ' class="k"'
        return f"<{tag}{kind}>{escaped(text).replace(chr(10), '<br>')}</{tag}>"

    head = "".join(cell("th", place, text) for place, text in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(cell("td", place, text) for place, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    fit = ' class="fit"' if numbers_from is not None and len(heads) < 5 else ""
    table = f"<table{fit}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def escaped(text: str) -> str:
    return html.escape(encodable(text))


def with_prefix(value: Any) -> str:
    """Format a number with an SI prefix, such as 1.31 M."""
    number = float(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:.3g}"
