"""Quick mode of the benchmarks: variants agree, and rows have the keys that readers rely on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Comparison, report
from benchmarks.processes import ChildFailed, run_ranks
from benchmarks.worker import alternate, cpu_s
from tests.harness.ranks import REPOSITORY

_NUM_ROWS = {
    "step": 4,
    "parallel": 6,
    "redistribute": 73,
    "convert": 15,
    "rank_recovery": 2,
    "buddies": 2,
    "lost_machine": 6,
    "paused_agents": 3,
    "failures": 3,
    "control_plane": 7,
}
_NEEDS_ROOT = {"buddies", "lost_machine", "paused_agents"}
_KEYS = ["case", "metric", "unit", "ours", "floor", "peer", "goal", "met", "kind"]


@pytest.mark.matrix
@pytest.mark.parametrize("name", _NUM_ROWS)
def test_quick_mode_writes_rows(name: str, tmp_path: Path) -> None:
    if name in _NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("mount namespaces need root")
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(path)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    # 0: the variants did the same work. A missed goal is no failure.
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(path.read_text())
    environment = json.loads((tmp_path / "rows.environment.json").read_text())
    assert environment["versions"]["torch"] and environment["machine"] and environment["date"]
    assert len(rows) == _NUM_ROWS[name]
    for row in rows:
        assert list(row) == [key for key in _KEYS if key in row]
        assert {"case", "metric", "unit", "met", "kind"} <= set(row)
        assert row["ours"] >= 0
        assert "floor" not in row or "peer" not in row


def test_goals_are_met_only_by_variants_that_did_the_same_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = Comparison("good"), Comparison("bad", other="peer")
    good.same("threads", 1, 1)
    bad.close_losses([1.0, float("nan")], [1.0, 2.0], shown=2)
    results = [
        good.ratio("time", "s", 1.0, floor=2.0, goal=0.5),
        good.ratio("rate", "B/s", 1.0, peer=2.0, goal=0.6, more_is_better=True),
        good.value("size", "B", 3, goal=2),
        good.value("shown", "B", 3),
        bad.ratio("time", "s", 1.0, floor=2.0, goal=0.5),
    ]
    assert [row.met for row, _ in results] == [True, False, False, True, False]
    assert not report(results, tmp_path / "rows.json")
    assert "FAILED: the loss of step 2 differs" in capsys.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["kind"] for row in rows] == ["<=", ">=", "value <=", "-", "<="]
    assert "goal" not in rows[3]


def test_variants_alternate_without_their_warm_up() -> None:
    calls: list[str] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = alternate({"a": lambda: call("a"), "b": lambda: call("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_ranks_return_the_value_of_a_function(tmp_path: Path) -> None:
    (seconds,) = run_ranks(cpu_s, {}, 1, tmp_path)
    assert seconds > 0
    with pytest.raises(ChildFailed, match="unexpected keyword"):
        run_ranks(cpu_s, {"unknown": 1}, 1, tmp_path)
