"""The HTML page of a report, in one file that needs no network.

Invariant: text from files is always escaped in the page, as text between tags or inside JSON
without the character "<". A content security policy allows only the two scripts of the page, by
their hashes, and no requests.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.optional_dependencies import require
from torchtitan_lite.tools.report.comparison import COMPARED, NAMES, Comparison, StepDifference
from torchtitan_lite.tools.report.curves import Figure
from torchtitan_lite.tools.report.figures import (
    account_label,
    curve_figures,
    difference_figure,
    duration,
    format_utc,
    goodput_figure,
    kind_name,
    loss_figure,
    ordered_kinds,
    router_figures,
    speed_figures,
    timeline_figure,
)
from torchtitan_lite.tools.report.html_parts import (
    SCRIPT,
    STYLE,
    escaped,
    html_table,
    with_prefix,
)
from torchtitan_lite.tools.report.json_lines import is_number
from torchtitan_lite.tools.report.run_files import Goodput, RunFiles
from torchtitan_lite.tools.report.timeline import KINDS, ROUTINE, RunTimeline, timeline

_MAX_ROWS = 200
"""Maximum rows of the table of events."""


@dataclass(frozen=True)
class _Section:
    title: str
    anchor: str
    content: str


class _Figures:
    """Figures of the page: their containers, and the JSON of all of them."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def place(self, figure: Figure | None, *, is_titled: bool = True) -> str:
        """Return the card of a figure; an empty text for None."""
        if figure is None:
            return ""
        name = f"figure-{len(self._made)}"
        self._made[name] = {"data": figure.data, "layout": figure.layout}
        title = f"<h3>{escaped(figure.title)}</h3>" if is_titled else ""
        note = f'<p class="note">{escaped(figure.note)}</p>' if figure.note else ""
        wide = " wide" if figure.is_wide else ""
        height = int(figure.layout.get("height", 300))
        return (
            f'<div class="card{wide}">{title}<div id="{name}" style="height:{height}px"></div>'
            f"{note}</div>"
        )

    def grid(self, figures: Sequence[Figure | None]) -> str:
        """Lay out two figures per row; a single last one fills its row."""
        existing = [figure for figure in figures if figure is not None]
        narrow = [figure for figure in existing if not figure.is_wide]
        if len(narrow) % 2:
            existing[existing.index(narrow[-1])] = replace(narrow[-1], is_wide=True)
        cards = "".join(self.place(figure) for figure in existing)
        return f'<div class="grid">{cards}</div>' if cards else ""

    def json(self) -> str:
        """Return JSON that is safe between script tags: it cannot contain a tag or a comment."""
        text = json.dumps(self._made, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(path: Path, runs: Sequence[RunFiles], comparisons: Sequence[Comparison]) -> None:
    """Write the report of `runs` to `path`; `comparisons` compare the first with each other run.
    Raises UserError if plotly is missing or the file cannot be written."""
    text = page(runs, comparisons)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"The report cannot be written to {path}: {error}") from error


def page(runs: Sequence[RunFiles], comparisons: Sequence[Comparison]) -> str:
    """Return the page as text. Raises UserError if plotly is missing."""
    library = _library()
    figures, timelines = _Figures(), [timeline(run) for run in runs]
    sections = [
        _Section("Comparison", "comparison", _comparison(figures, comparisons)),
        _Section("Training", "training", _training(figures, runs)),
        _Section("Throughput and memory", "throughput", figures.grid(speed_figures(runs))),
        _Section("Goodput", "goodput", _goodput(figures, runs)),
        _Section("Timeline", "timeline", _timelines(figures, runs, timelines)),
        _Section("Router load", "router", figures.grid(router_figures(runs))),
        _Section("Config", "config", _configs(runs)),
    ]
    shown = [section for section in sections if section.content]
    title = " and ".join(run.label for run in runs[:3]) + (" and more" if len(runs) > 3 else "")
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in (library, SCRIPT))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    links = "".join(f'<a href="#{part.anchor}">{escaped(part.title)}</a>' for part in shown)
    body = "".join(
        f'<section id="{part.anchor}"><h2>{escaped(part.title)}</h2>{part.content}</section>'
        for part in shown
    )
    cards = "".join(
        _header(run, one_timeline) for run, one_timeline in zip(runs, timelines, strict=True)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}: training report</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Training report</h1>
<p class="sub">{escaped(title)}</p>
<nav>{links}</nav>
{cards}
{_problems(runs)}
{body}
<footer>Made by torchtitan-lite report from the files of the run. This page makes no network
requests.</footer>
</main>
<script type="application/json" id="figures">{figures.json()}</script>
<script>{library}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _library() -> str:
    """Return the source of plotly.js, to embed. Raises UserError if it is missing."""
    require("plotly", "torchtitan-lite report")
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _header(run: RunFiles, run_timeline: RunTimeline) -> str:
    """Return the name of a run and its most important numbers."""
    facts = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}"
        + (f" <small>{escaped(detail)}</small>" if detail else "")
        + "</dd></div>"
        for name, value, detail in _facts(run, run_timeline)
    )
    description = run.setting("job", "description")
    about = f'<div class="note">{escaped(str(description))}</div>' if description else ""
    return (
        f'<div class="card"><div class="run-name">{escaped(run.label)}</div>'
        f'<div class="path">{escaped(str(run.folder.resolve()))}</div>{about}'
        f'<dl class="facts">{facts}</dl></div>'
    )


def _facts(run: RunFiles, run_timeline: RunTimeline) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and detail of each known fact."""
    model = [run.setting("model", key) for key in ("name", "flavor")]
    if any(model):
        yield "Model", " ".join(str(word) for word in model if word), ""
    starts = run.events("start")
    if starts:
        values = starts[-1].values
        parameters, active = values.get("parameters"), values.get("active_parameters")
        if is_number(parameters):
            is_sparse = is_number(active) and active != parameters
            yield (
                "Parameters",
                with_prefix(parameters),
                f"{with_prefix(active)} active" if is_sparse else "",
            )
        ranks = values.get("ranks")
        num_replicas = sum(stream.replica is not None for stream in run.leaders)
        if is_number(ranks):
            shown = f"{num_replicas} x {ranks}" if num_replicas else str(ranks)
            device = values.get("device")
            kind = "replicas x ranks" if num_replicas else "ranks"
            yield "Processes", shown, f"{kind}, {device}" if isinstance(device, str) else kind
    if run.merged:
        newest = run.merged[-1]
        planned = run.setting("training", "steps")
        detail = f"of {planned:,}" if isinstance(planned, int) else ""
        yield "Steps", f"{newest.step:,}", detail
        if newest["tokens"] is not None:
            yield "Tokens", with_prefix(newest["tokens"]), ""
        duration_s, basis = _duration_s(run, run_timeline)
        if duration_s is not None:
            yield "Duration", duration(duration_s), basis
        loss = newest["loss"]
        yield "Final loss", "not finite" if loss is None else f"{loss:.4f}", ""
    validations = [
        loss for event in run.events("validation") if is_number(loss := event.values.get("loss"))
    ]
    if validations:
        yield "Validation loss", f"{validations[-1]:.4f}", ""
    if rates := run.known("tokens_per_second"):
        yield "Throughput", with_prefix(median(rates)), "tokens/s, median"
    if shares := run.known("mfu"):
        yield "MFU", f"{median(shares):.1%}", "median"
    if run.goodput:
        worst = min(account.goodput for account in run.goodput)
        best = max(account.goodput for account in run.goodput)
        shown = f"{best:.1%}" if best - worst < 0.0005 else f"{worst:.1%} to {best:.1%}"
        yield "Goodput", shown, "by replica" if len(run.goodput) > 1 else ""
    faults = sum(mark.kind in ("fault", "error", "machine_fault") for mark in run_timeline.marks)
    aborted = sum(mark.kind == "aborted" for mark in run_timeline.marks)
    skipped = sum(mark.kind == "skipped" for mark in run_timeline.marks)
    counts = [(aborted, "aborted"), (skipped, "skipped")]
    detail = [f"{count} {name} step{'s' * (count > 1)}" for count, name in counts if count]
    yield "Faults", str(faults), ", ".join(detail)


def _duration_s(run: RunFiles, run_timeline: RunTimeline) -> tuple[float | None, str]:
    """Return the wall time of the run, and what it is derived from."""
    if run.goodput:
        return max(account.wall_s for account in run.goodput), "wall time"
    times = run.known("time")
    if times and run_timeline.first_time is not None:
        return max(times) - run_timeline.first_time, "wall time"
    steps = run.known("step_time_s")
    return (sum(steps), "sum of steps") if steps else (None, "")


def _problems(runs: Sequence[RunFiles]) -> str:
    problems = [problem for run in runs for problem in run.problems]
    if not problems:
        return ""
    lines = escaped("\n".join(problems))
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)} in the files"
    return (
        f'<div class="card warn"><details><summary>{count}</summary><pre>{lines}</pre></details>'
        "</div>"
    )


def _training(figures: _Figures, runs: Sequence[RunFiles]) -> str:
    return figures.grid([loss_figure(runs), *curve_figures(runs)])


def _comparison(figures: _Figures, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return ""
    rows = []
    for comparison in comparisons:
        for name in COMPARED:
            first, largest = comparison.first_difference(name), comparison.largest(name)
            if largest is None:
                rows.append([comparison.other, NAMES[name], "no common steps", "", "", ""])
            elif first is None:
                common = f"equal at all {len(comparison.steps):,} common steps"
                rows.append([comparison.other, NAMES[name], common, "", "", ""])
            else:
                rows.append(
                    [
                        *(
                            comparison.other,
                            NAMES[name],
                            f"step {first.step:,}",
                            _difference(first),
                        ),
                        *(f"step {largest.step:,}", _difference(largest)),
                    ]
                )
    heads = ["run", "value", "first difference", "", "largest relative difference", ""]
    table = html_table(heads, rows)
    intro = escaped(
        f"Against {comparisons[0].first}, the first run, over the committed steps that both have."
    )
    ends = "; ".join(filter(None, (comparison.different_ends() for comparison in comparisons)))
    warning = f'<p class="bad">{escaped(ends)}</p>' if ends else ""
    shown = f'<div class="card"><p class="note">{intro}</p>{warning}{table}</div>'
    shown += _budgets(comparisons)
    shown += figures.grid([difference_figure(comparisons)])
    for comparison in comparisons:
        config = html_table(
            ["key", comparison.first, comparison.other], [list(row) for row in comparison.config]
        )
        title = escaped(f"Config: {comparison.first} and {comparison.other}")
        content = config if comparison.config else '<p class="note">The configs are equal.</p>'
        shown += f'<div class="card below"><h3>{title}</h3>{content}</div>'
    return shown


def _budgets(comparisons: Sequence[Comparison]) -> str:
    """Return the losses at equal tokens and in equal time: runs whose batches or speeds differ do
    not compare by steps."""
    rows = [
        [
            comparison.other,
            f"{with_prefix(budget.amount)} tokens"
            if budget.axis == "tokens"
            else duration(budget.amount),
            _value(budget.first),
            _value(budget.other),
        ]
        for comparison in comparisons
        for budget in comparison.budgets
    ]
    if not rows:
        return ""
    first = comparisons[0].first
    heads = ["run", "after", f"loss of {first}", "loss of the run"]
    note = (
        "At equal tokens and in equal time since the first step: what the shorter run has used. "
        "Means of up to 10 steps."
    )
    return f'<div class="card below"><p class="note">{note}</p>{html_table(heads, rows)}</div>'


def _difference(difference: StepDifference) -> str:
    values = (f"{_value(difference.first)} and {_value(difference.other)}",)
    return (
        f"{values[0]}, relative {difference.relative:.3g}"
        if difference.relative < math.inf
        else values[0]
    )


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.8g}"


def _goodput(figures: _Figures, runs: Sequence[RunFiles]) -> str:
    figure = goodput_figure(runs)
    if figure is None:
        return ""
    accounts = [(run, account) for run in runs for account in run.goodput]
    heads = [
        "kind of time",
        *(account_label(run, account, len(runs) > 1) for run, account in accounts),
    ]
    rows = [
        ["goodput", *(f"{account.goodput:.1%}" for _, account in accounts)],
        ["wall time", *(duration(account.wall_s) for _, account in accounts)],
    ]
    for kind in ordered_kinds([account for _, account in accounts]):
        rows.append([kind_name(kind), *(_seconds(account, kind) for _, account in accounts)])
    note = (
        "Goodput is the share of wall time that went into the computation and communication of "
        "steps that were committed and kept."
    )
    return (
        figures.grid([figure])
        + f'<div class="card below">{html_table(heads, rows, numbers_from=1)}'
        + f'<p class="note">{note}</p></div>'
    )


def _seconds(account: Goodput, kind: str) -> str:
    seconds = account.seconds.get(kind, 0.0)
    return (
        f"{seconds:,.1f} s ({seconds / account.wall_s:.1%})"
        if account.wall_s > 0 and seconds
        else "0 s"
    )


def _timelines(
    figures: _Figures, runs: Sequence[RunFiles], timelines: Sequence[RunTimeline]
) -> str:
    shown = ""
    for run, run_timeline in zip(runs, timelines, strict=True):
        figure = timeline_figure(run, run_timeline)
        if figure is None:
            continue
        shown += f'<div style="margin-bottom:14px">{figures.place(figure, is_titled=len(runs) > 1)}'
        shown += _recoveries(run_timeline) + _events(run_timeline) + "</div>"
    return shown


def _recoveries(run_timeline: RunTimeline) -> str:
    if not run_timeline.recoveries:
        return ""
    first = run_timeline.first_time or 0.0
    rows = [
        [
            f"replica {recovery.replica}",
            duration(recovery.time - first),
            recovery.reason,
            "before its first step"
            if recovery.failed_after is None
            else f"step {recovery.failed_after:,}",
            "did not return" if recovery.seconds is None else duration(recovery.seconds),
            "" if recovery.resumed_at is None else f"step {recovery.resumed_at:,}",
        ]
        for recovery in run_timeline.recoveries[:_MAX_ROWS]
    ]
    heads = ["", "at", "failure", "last step before it", "recovered after", "next step"]
    return f'<div class="card"><h3>Recoveries</h3>{html_table(heads, rows)}</div>'


def _events(run_timeline: RunTimeline) -> str:
    """Return a table of the events that do not occur in every run."""
    notable = [mark for mark in run_timeline.marks if mark.kind not in ROUTINE]
    if not notable:
        return ""
    first = run_timeline.first_time
    rows = [
        [
            "" if mark.time is None or first is None else duration(mark.time - first),
            mark.lane,
            "" if mark.step is None else f"{mark.step:,}",
            KINDS[mark.kind],
            mark.text,
        ]
        for mark in notable[:_MAX_ROWS]
    ]
    more = len(notable) - _MAX_ROWS
    note = f'<p class="note">{more} more are not listed.</p>' if more > 0 else ""
    is_open = " open" if len(rows) <= 12 else ""
    started = "" if first is None else f", first start {format_utc(first)}"
    return (
        f'<div class="card"><details{is_open}><summary>Events ({len(notable)}{started})</summary>'
        f"{html_table(['at', 'where', 'step', 'event', 'details'], rows)}{note}</details></div>"
    )


def _configs(runs: Sequence[RunFiles]) -> str:
    shown = ""
    for run in runs:
        if run.config_text:
            title = f"config.toml of {run.label}" if len(runs) > 1 else "config.toml, resolved"
            shown += (
                f'<div class="card"><details><summary>{escaped(title)}</summary>'
                f'<pre class="columns">{escaped(run.config_text)}</pre></details></div>'
            )
    return shown
