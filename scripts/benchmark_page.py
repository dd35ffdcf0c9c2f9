"""Write docs/benchmarks.md and the figures of the docs from benchmarks/results/, or check them.

python -m scripts.benchmark_page [--check]

A figure in README.md or docs/ names its origin in a comment right behind it, such as

    0.23 s<!-- figure: recovery / ours, builtin lighthouse / survivor's stall, p95 of 7 / ours -->

with file, case, metric, and `ours`, `peer`, `floor` or `ratio` (ours divided by peer or floor).
The number in front of each comment is that of the file, to the digits shown; read the sentences
around a figure that has changed.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
COMPARISON = ROOT / "benchmarks" / "comparison.md"
"""Text about other systems, which the page repeats."""
ENVIRONMENT = ".environment.json"
LONG = 60
"""Number of rows above which a file is summarized."""
GROUP = 4
"""Minimum rows of one metric that a summary joins."""

TITLES = {
    "step": ("Cost of a training step", "a hand-written loop for the same model, one process each"),
    "parallel": (
        "Cost of parallelism",
        "hand-written FSDP2, tensor and pipeline parallel loops; torch's ring attention",
    ),
    "redistribute": (
        "Redistribution",
        "the planner against time limits; exchanges against a copy of the same bytes (floor) and "
        "DTensor (peer)",
    ),
    "optimizer": (
        "Muon on shards",
        "the iterations of one process divided by the ranks, and a bare exchange of the same bytes "
        "(floor); an all-gather of every matrix on every rank (peer)",
    ),
    "checkpoint": (
        "Checkpoints",
        "torchtitan's checkpoint manager and torch DCP (peers); memcpy, safetensors and plain "
        "reads (floors)",
    ),
    "recovery": (
        "Recovery from failures",
        "a trainer written directly on torchft, and a restart from a checkpoint",
    ),
    "rank_recovery": (
        "Replacement of a dead rank",
        "torchrun's agent, which starts all ranks again (peer)",
    ),
    "resize": (
        "A live run on another mesh",
        "a save, a restart on the other mesh, and a load (peer)",
    ),
    "publish": (
        "Published weights",
        "a gloo broadcast of the gathered model, and one safetensors file in shared memory (peers)",
    ),
    "buddies": (
        "Copies of snapshots on another machine",
        "the same training without copies (floor)",
    ),
    "lost_machine": (
        "A lost machine",
        "none; a machine that falls silent is replaced after 3 s, one whose connections end after "
        "0.5 s, and outputs are visible when its lease has ended, after 8 s",
    ),
    "paused_agents": (
        "Machines that are lost falsely",
        "none; an agent or the coordinator is paused for a second, one after the other, beside two "
        "busy loops per core",
    ),
    "control_plane": (
        "The coordinator with many machines",
        "none; simulated machines, all in one process at one address",
    ),
    "gpu": ("A step on a GPU", "torchtitan 0.2.2's own trainer, on one GPU"),
    "convert": (
        "Hugging Face conversion",
        "the safetensors library, file by file (floor); torch DCP's Hugging Face reader and writer "
        "(peer)",
    ),
    "failures": ("Failure model", "the lost time that the model predicts (peer)"),
}
_METHOD = (
    "Each benchmark measures this project, a floor (the least work that the task needs) and, where "
    "one exists, a peer in the same run, alternating, and reports medians after a warm-up. It "
    "checks that all sides did the same work (equal losses, bytes, dtype and threads)."
)
_COLUMNS = (
    "*Ratio* is ours divided by the peer, or by the floor if there is no peer. *Goal* is the limit "
    "that was set for the project: `<=` and `>=` bound the ratio, `value <=` and `value >=` bound "
    "our own figure. Results from before the kind of a goal was recorded show the number alone; "
    "the source of the benchmark has the kind. *Met* is computed from the figures of the same run."
)
_FIGURE = re.compile(
    r"(?P<number>-?[\d,]*\.?\d+)[^\d<>|]{0,12}<!-- figure: (?P<origin>[^>]*?) -->", re.DOTALL
)
_CASES = re.compile(r"(median|worst) of \d+ cases, (\d+ proc)")
"""Rows that are already summaries of a benchmark."""
_MARK = re.compile(r"<!-- figure: ")


@dataclass(frozen=True)
class Result:
    """One file of benchmarks/results/."""

    name: str
    rows: list[dict[str, Any]]
    environment: dict[str, Any] | None
    """Machine, versions and date of the run, if the run recorded them."""


def main() -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Write docs/benchmarks.md and the figures of all pages from the results."
    )
    parser.add_argument("--check", action="store_true", help="only check page and figures")
    options = parser.parse_args()
    results = read_results(RESULTS)
    text = page(results)
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        for path in _pages():
            before = path.read_text(encoding="utf-8")
            after = with_figures(before, results)
            if after != before:
                path.write_text(after, encoding="utf-8")
                print(f"{path.relative_to(ROOT)}: figures changed, read the text around them.")
    problems = list(wrong_figures(results))
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        problems.append("docs/benchmarks.md is not up to date: run `make docs`.")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def read_results(folder: Path) -> dict[str, Result]:
    """Return all results by name, in the order of the page."""
    order = {name: place for place, name in enumerate(TITLES)}
    names = [path.stem for path in folder.glob("*.json") if not path.name.endswith(ENVIRONMENT)]
    results = {}
    for name in sorted(names, key=lambda name: (order.get(name, len(order)), name)):
        environment = folder / f"{name}{ENVIRONMENT}"
        results[name] = Result(
            name,
            json.loads((folder / f"{name}.json").read_text(encoding="utf-8")),
            json.loads(environment.read_text(encoding="utf-8")) if environment.exists() else None,
        )
    return results


def page(results: dict[str, Result]) -> str:
    """Return the text of docs/benchmarks.md."""
    met = sum(row["met"] for result in results.values() for row in result.rows)
    total = sum(len(result.rows) for result in results.values())
    lines = [
        "# Benchmarks",
        "",
        "<!-- Written by `python -m scripts.benchmark_page`; run `make docs` after a benchmark -->",
        "",
        f"{_devices(results)} {_METHOD}",
        "",
        f"{_COLUMNS} {met} of {total} rows met their goal; missed goals stay in the tables.",
        "",
        "| file | compared with | rows | met |",
        "|---|---|---|---|",
    ]
    for result in results.values():
        title, peers = _title(result.name)
        count = sum(row["met"] for row in result.rows)
        anchor = re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-")
        lines.append(f"| [{title}](#{anchor}) | {peers} | {len(result.rows)} | {count} |")
    if "gpu" not in results:
        title, peers = _title("gpu")
        lines.append(f"| {title}: not yet run on a GPU, see [gpu.md](gpu.md) | {peers} | - | - |")
    lines += ["", "Run all of them with `make bench`, on an otherwise idle machine."]
    comparison = with_figures(COMPARISON.read_text(encoding="utf-8"), results)
    lines += ["", "## Compared with other systems", "", comparison.strip()]
    for result in results.values():
        lines += ["", *_section(result)]
    return "\n".join(lines) + "\n"


def wrong_figures(results: dict[str, Result]) -> Iterator[str]:
    """Yield one line for each figure in the docs that differs from its file."""
    for path in _pages():
        text = path.read_text(encoding="utf-8")
        yield from (f"{path.relative_to(ROOT)}: {problem}" for problem in wrong_in(text, results))


def _pages() -> list[Path]:
    return [*sorted(ROOT.glob("README*.md")), COMPARISON, *sorted((ROOT / "docs").rglob("*.md"))]


def with_figures(text: str, results: dict[str, Result]) -> str:
    """Return `text` with the figures of the files, to the digits that it shows."""

    def corrected(match: re.Match[str]) -> str:
        value = _value(" ".join(match["origin"].split()), results)
        if value is None:
            return match[0]
        number = match["number"]
        digits, separator = len(number.partition(".")[2]), "," if "," in number else ""
        return f"{value:{separator}.{digits}f}" + match[0].removeprefix(number)

    return _FIGURE.sub(corrected, text)


def wrong_in(text: str, results: dict[str, Result]) -> Iterator[str]:
    """Yield one line for each figure in `text` that differs from its file."""
    figures = list(_FIGURE.finditer(text))
    if len(figures) != len(_MARK.findall(text)):
        yield "a `figure` comment has no number in front of it."
    for match in figures:
        number, origin = match["number"].replace(",", ""), " ".join(match["origin"].split())
        value = _value(origin, results)
        if value is None:
            yield f"no benchmark result has {origin!r}."
            continue
        digits = len(number.partition(".")[2])
        if f"{value:.{digits}f}" != number:
            yield f"{match['number']} is {value:.{digits}f} in {origin!r}."


def _value(origin: str, results: dict[str, Result]) -> float | None:
    parts = origin.split(" / ")
    if len(parts) != 4 or parts[0] not in results:
        return None
    for row in results[parts[0]].rows:
        if (row["case"], row["metric"]) == (parts[1], parts[2]):
            return _ratio(row) if parts[3] == "ratio" else row.get(parts[3])
    return None


def _title(name: str) -> tuple[str, str]:
    return TITLES.get(name, (name.replace("_", " ").capitalize(), "-"))


def _section(result: Result) -> list[str]:
    title, peers = _title(result.name)
    source = f"../benchmarks/results/{result.name}.json"
    lines = [
        f"## {title}",
        "",
        f"Compared with: {peers}. Run again: "
        f"`python -m benchmarks.{result.name} --json benchmarks/results/{result.name}.json` "
        f"(`--quick` for a small version). All rows: [{result.name}.json]({source}).",
        "",
        *_environment(result.environment),
        "",
    ]
    rows = result.rows
    if len(rows) > LONG:
        groups = _groups(rows)
        joined = {id(row) for group in groups.values() for row in group}
        joined |= {id(row) for row in rows if _CASES.fullmatch(row["case"])}
        rows = [row for row in rows if id(row) not in joined]
        lines += _summary(groups, result.rows)
        lines += ["", "The rows of other metrics:", ""] if rows else []
    return lines + (_table(rows) if rows else [])


def _devices(results: dict[str, Result]) -> str:
    on_gpu = [
        f"{result.name}.json"
        for result in results.values()
        if result.environment is not None and result.environment["gpu"]
    ]
    if not on_gpu:
        return "All figures were measured on CPU with gloo. No benchmark has run on a GPU yet."
    return f"Measured on GPUs: {', '.join(on_gpu)}. All other figures were measured on CPU."


def _environment(environment: dict[str, Any] | None) -> list[str]:
    if environment is None:
        return ["Machine, versions and date: not recorded."]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return [
        f"Machine: {environment['machine']}. Versions: {versions}. Date: {environment['date']}. "
        f"Commit: {environment['commit'] or 'not recorded'}."
    ]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| case | metric | unit | ours | floor | peer | ratio | goal | met |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{row['case']} ({row['card']})" if "card" in row else row["case"],
            row["metric"],
            row["unit"],
            *(_number(row.get(key)) for key in ("ours", "floor", "peer")),
            _number(_ratio(row)),
            _goal(row),
            _met(row),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _groups(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group the rows that a summary joins, by number of processes and metric."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        match = re.search(r"\d+ proc", row["case"])
        if match and _ratio(row) is not None and not _CASES.fullmatch(row["case"]):
            groups.setdefault((match[0], row["metric"]), []).append(row)
    return {key: group for key, group in groups.items() if len(group) >= GROUP}


def _summary(
    groups: dict[tuple[str, str], list[dict[str, Any]]], rows: list[dict[str, Any]]
) -> list[str]:
    own = {
        (match[1], match[2], row["metric"]): row
        for row in rows
        if (match := _CASES.fullmatch(row["case"]))
    }
    lines = [
        "Ratios over all cases of a metric; lower is better. Goals of the benchmark for the median "
        "or the worst case are in brackets; the worst case is the one that is closest to its goal "
        "or beyond it.",
        "",
        "| processes | metric | cases | median ratio | worst ratio | goal per case | cases met |",
        "|---|---|---|---|---|---|---|",
    ]
    for (processes, metric), group in groups.items():
        ratios = [ratio for row in group if (ratio := _ratio(row)) is not None]
        median, worst = (
            _over_cases(own.get((name, processes, metric)), value)
            for name, value in (("median", statistics.median(ratios)), ("worst", max(ratios)))
        )
        by_goal = sorted(group, key=lambda row: row.get("goal", 0))
        goals = " to ".join(dict.fromkeys((_goal(by_goal[0]), _goal(by_goal[-1]))))
        lines.append(
            f"| {processes.split()[0]} | {metric} | {len(group)} | {median} | {worst} | {goals} | "
            f"{sum(row['met'] for row in group)} of {len(group)} |"
        )
    return lines


def _over_cases(row: dict[str, Any] | None, value: float) -> str:
    """Show the row of a benchmark over all cases, or the value if it has none."""
    if row is None:
        return _number(value)
    return f"{_number(row['ours'])} (goal {_goal(row)}: {_met(row)})"


def _met(row: dict[str, Any]) -> str:
    return "yes" if row["met"] else "**no**"


def _goal(row: dict[str, Any]) -> str:
    if "goal" not in row:
        return "-"
    kind = row.get("kind")
    return f"{kind} {row['goal']:.4g}" if kind else f"{row['goal']:.4g}"


def _ratio(row: dict[str, Any]) -> float | None:
    reference = row.get("peer", row.get("floor"))
    return row["ours"] / reference if reference else None


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0 or 0.001 <= abs(value) < 10_000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.2e}"


if __name__ == "__main__":
    sys.exit(main())
