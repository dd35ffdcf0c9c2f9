"""The generated page of benchmarks, and the figures in the docs that come from its files."""

import json
from pathlib import Path
from typing import Any

from scripts.benchmark_page import (
    PAGE,
    RESULTS,
    page,
    read_results,
    with_figures,
    wrong_figures,
    wrong_in,
)

_MARK = "<!-- figure: one / a case, 2 proc / time / {} -->"


def row(**changes: Any) -> dict[str, Any]:
    plain = {"case": "a case, 2 proc", "metric": "time", "unit": "s", "ours": 0.2341}
    values = {**plain, "peer": 0.9815, "goal": 0.5, "met": True, **changes}
    return {key: value for key, value in values.items() if value is not None}


def write(folder: Path, rows: list[dict[str, Any]], environment: dict[str, Any] | None) -> None:
    (folder / "one.json").write_text(json.dumps(rows))
    if environment is not None:
        (folder / "one.environment.json").write_text(json.dumps(environment))


def test_the_page_is_up_to_date_and_all_figures_of_the_docs_are_in_the_files() -> None:
    results = read_results(RESULTS)
    assert PAGE.read_text(encoding="utf-8") == page(results)
    assert list(wrong_figures(results)) == []


def test_figures_are_compared_to_the_digits_shown(tmp_path: Path) -> None:
    write(tmp_path, [row()], None)
    results = read_results(tmp_path)
    good = f"stalls 0.23 s{_MARK.format('ours')}, not 0.98 s{_MARK.format('peer')}"
    assert list(wrong_in(good, results)) == []
    assert list(wrong_in(f"0.239 of it{_MARK.format('ratio')}", results)) == []
    (problem,) = wrong_in(f"0.24 s{_MARK.format('ours')}", results)
    assert problem.startswith("0.24 is 0.23 in")
    (problem,) = wrong_in("1.0 s<!-- figure: one / another case / time / ours -->", results)
    assert "no benchmark result" in problem
    (problem,) = wrong_in(f"some{_MARK.format('ours')}", results)
    assert "no number" in problem


def test_environment_kind_and_missed_goals_are_shown(tmp_path: Path) -> None:
    environment = {
        "date": "2026-11-23", "machine": "a CPU, 2 cores", "gpu": None,
        "versions": {"torch": "2.13.0"}, "commit": "abc",
    }  # fmt: skip
    write(tmp_path, [row(kind="value <=", goal=0.2, met=False)], environment)
    text = page(read_results(tmp_path))
    assert "Machine: a CPU, 2 cores. Versions: torch 2.13.0. Date: 2026-11-23." in text
    assert "| 0.2341 | - | 0.9815 | 0.2385 | value <= 0.2 | **no** |" in text
    (tmp_path / "one.environment.json").unlink()
    assert "Machine, versions and date: not recorded." in page(read_results(tmp_path))


def test_long_files_are_summarized(tmp_path: Path) -> None:
    rows = [row(case=f"case {number}, 4 proc", ours=number + 1, peer=10) for number in range(70)]
    rows.append(row(case="worst of 70 cases, 4 proc", ours=7, peer=None, floor=1, goal=9))
    text = page(read_results_of(tmp_path, rows))
    assert "| 4 | time | 70 | 3.55 | 7 (goal 9: yes) | 0.5 | 70 of 70 |" in text
    assert "case 12" not in text


def read_results_of(folder: Path, rows: list[dict[str, Any]]) -> Any:
    write(folder, rows, None)
    return read_results(folder)


def test_figures_are_written_to_the_digits_shown(tmp_path: Path) -> None:
    write(tmp_path, [row(ours=1234.567)], None)
    results = read_results(tmp_path)
    before = f"**0.1 s**{_MARK.format('ours')}, 7{_MARK.format('peer')}, some{_MARK.format('ours')}"
    before += f", 1,000{_MARK.format('ours')}, 3<!-- figure: one / no / such / ours -->"
    after = with_figures(before, results)
    assert after.startswith("**1234.6 s**<!--") and ", 1<!--" in after and ", 1,235<!--" in after
    assert ", some<!--" in after and after.endswith(", 3<!-- figure: one / no / such / ours -->")
