"""The mutation score by operator, the mutants that survive, and the tests that kill the others."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutants.general import GENERAL
from tests.mutants.operators import OPERATORS
from tests.mutants.runner import Outcome
from tests.mutants.sites import Site

EQUIVALENT = Path(__file__).with_name("equivalent.json")
"""Site -> why the mutant cannot behave differently, as two readers agreed."""
KILLERS = Path(__file__).with_name("killers.json")
"""Site -> a test of `make test` that kills the mutant."""


_OPERATORS = (
    *((operator.name, operator.meaning, operator.precedent) for operator in OPERATORS),
    (GENERAL, "an operator of Cosmic Ray, in modules of pure decisions", ""),
)


def equivalent_sites() -> dict[str, str]:
    return json.loads(EQUIVALENT.read_text())


def table(drawn: Sequence[Site], outcomes: Mapping[str, Outcome]) -> str:
    """Return the score by operator as a Markdown table."""
    lines = [
        "| mistake | as in | mutants | killed | of these by a time-out | equivalent | survive "
        "| do not run | score | without the exclusion |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    equivalent = equivalent_sites()
    for name, meaning, precedent in _OPERATORS:
        counts = Counter(
            _kind(outcomes[site.id], equivalent)
            for site in drawn
            if site.operator == name and site.id in outcomes
        )
        total += counts
        lines.append(_row(f"{name}: {meaning}", precedent, counts))
    lines.append(_row("all", "", total))
    return "\n".join(lines)


def known_table(sites: Sequence[Site]) -> str:
    """Return as a Markdown table how many sites of each operator have a known killer, or are known
    to be equivalent."""
    killers, equivalent = json.loads(KILLERS.read_text()), equivalent_sites()
    lines = ["| mistake | sites | known killer | equivalent | not known |", "|---|---|---|---|---|"]
    total: Counter[str] = Counter()
    for name, _, _ in _OPERATORS:
        counts = Counter(
            "killed" if site.id in killers else "same" if site.id in equivalent else "open"
            for site in sites
            if site.operator == name
        )
        total += counts
        lines.append(_known_row(name, counts))
    return "\n".join([*lines, _known_row("all", total)])


def _known_row(name: str, counts: Counter[str]) -> str:
    numbers = (counts.total(), counts["killed"], counts["same"], counts["open"])
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def survivors(drawn: Sequence[Site], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Describe the mutants that survive, and those that are equivalent."""
    reasons = equivalent_sites()
    return [
        f"{site.id} {site.operator}: {site} "
        f"({reasons.get(site.id) or outcomes[site.id].outcome}, "
        f"{outcomes[site.id].num_tests} tests)"
        for site in drawn
        if site.id in outcomes and outcomes[site.id].is_alive
    ]


def save_killers(outcomes: Iterable[Outcome], sites: Iterable[Site]) -> None:
    """Save the tests of `make test` that kill mutants."""
    known = {site.id for site in sites}
    killers = {
        outcome.site: outcome.test
        for outcome in outcomes
        if outcome.outcome == "killed" and not outcome.includes_matrix and outcome.site in known
    }
    KILLERS.write_text(json.dumps(dict(sorted(killers.items())), indent=0) + "\n")


def _kind(outcome: Outcome, equivalent: Mapping[str, str]) -> str:
    if outcome.is_alive:
        return "equivalent" if outcome.site in equivalent else "survived"
    return outcome.outcome


def _row(name: str, precedent: str, counts: Counter[str]) -> str:
    killed = counts["killed"] + counts["timeout"]
    alive = counts["survived"]
    return (
        f"| {name} | {precedent} | {counts.total() - counts['broken']} | {killed} "
        f"| {counts['timeout']} | {counts['equivalent']} | {alive} | {counts['broken']} "
        f"| {_share(killed, killed + alive)} "
        f"| {_share(killed, killed + alive + counts['equivalent'])} |"
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
