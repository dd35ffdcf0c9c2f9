"""The benchmarks run in their quick mode, their sides agree, and their rows have the keys that
readers of the files need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import REPOSITORY

_NUM_ROWS = {"step": 4, "parallel": 6, "redistribute": 53, "convert": 14}


@pytest.mark.matrix
@pytest.mark.parametrize("name", _NUM_ROWS)
def test_quick_mode_writes_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(path)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    # 0 means that the sides did the same work. A time that misses its goal is not a failure.
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(path.read_text())
    environment = json.loads((tmp_path / "rows.environment.json").read_text())
    assert environment["versions"]["torch"] and environment["machine"] and environment["date"]
    assert len(rows) == _NUM_ROWS[name]
    for row in rows:
        assert " ".join(row) == "case metric unit ours floor peer goal met kind"
        assert row["ours"] >= 0
        assert row["floor"] is None or row["peer"] is None
