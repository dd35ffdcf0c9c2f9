"""The table of results by kind of fault."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.diagnosis.scorer import Verdict

_EVIDENCE_CHARS = 110


def markdown_table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row per kind, and the first diagnosis of one of its faults."""
    verdicts = [verdict.value for verdict in Verdict]
    heading = ["fault", "injected", *verdicts, "an example of what was said"]
    lines = [_row(heading), _row(["---"] * len(heading))]
    scored = [one for one in results if one["verdict"] in verdicts]
    for kind in sorted({one["kind"] for one in scored}):
        of_kind = [one for one in scored if one["kind"] == kind]
        right = [one for one in of_kind if one["verdict"] == Verdict.RIGHT.value]
        example = (right or of_kind)[0]["evidence"][0][:_EVIDENCE_CHARS].replace("|", "/")
        lines.append(_row([kind, *_counts(of_kind), f"`{example}`" if example else ""]))
    lines.append(_row(["**all**", *_counts(scored), f"{share_right(results):.0%} right"]))
    return "\n".join(lines)


def share_right(results: Sequence[dict[str, Any]]) -> float:
    """Return the fraction of the injected faults that were diagnosed right."""
    counts = Counter(one["verdict"] for one in results)
    injected = sum(counts[verdict.value] for verdict in Verdict)
    return counts[Verdict.RIGHT.value] / injected if injected else 0.0


def _counts(results: Sequence[dict[str, Any]]) -> list[str]:
    counts = Counter(one["verdict"] for one in results)
    return [str(len(results)), *(str(counts[verdict.value]) for verdict in Verdict)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
