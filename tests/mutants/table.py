"""The score of each operator, and the mutants that survive."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.mutants.general import GENERAL
from tests.mutants.operators import OPERATORS
from tests.mutants.runner import Outcome
from tests.mutants.sites import Site


def table(drawn: Sequence[Site], outcomes: Mapping[str, Outcome]) -> str:
    """Return the score by operator as a Markdown table, and a list of survivors."""
    lines = [
        "| mistake | run | killed | by a time-out | survive | not reached | do not run | score |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    for name in (*(operator.name for operator in OPERATORS), GENERAL):
        of_operator = [
            outcomes[site.id].outcome
            for site in drawn
            if site.operator == name and site.id in outcomes
        ]
        counts = Counter(of_operator)
        total += counts
        lines.append(_row(name, counts))
    lines.append(_row("**all**", total))
    survivors = [
        f"- {site.id} {site.operator}: {site} ({outcomes[site.id].outcome}, "
        f"{outcomes[site.id].num_tests} tests)"
        for site in drawn
        if site.id in outcomes and outcomes[site.id].outcome in ("survived", "unreached")
    ]
    return "\n".join([*lines, "", *survivors])


def _row(name: str, counts: Counter[str]) -> str:
    killed = counts["killed"] + counts["timeout"]
    counted = counts.total() - counts["broken"]
    score = f"{100 * killed / counted:.1f} %" if counted else "-"
    return (
        f"| {name} | {counts.total()} | {counts['killed']} | {counts['timeout']} "
        f"| {counts['survived']} | {counts['unreached']} | {counts['broken']} | {score} |"
    )
