"""The notebook of the docs: its cells run in order, as in Jupyter, and print what it shows."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.docs_commands import user_environment
from tests.harness.ranks import REPOSITORY

NOTEBOOK = REPOSITORY / "docs" / "notebook.ipynb"
IGNORED = "nbval-ignore-output"
"""Tag of cells whose output has times. It is that of the pytest plugin nbval."""
_RUN_CELLS = """
import contextlib, io, json, sys
scope, printed = {"__name__": "__main__"}, []
for number, cell in enumerate(json.load(sys.stdin), start=1):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(cell, f"cell {number}", "exec"), scope)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@pytest.mark.matrix
def test_the_cells_print_what_the_notebook_shows(tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [user_environment() / "bin" / "python", "-c", _RUN_CELLS],
        input=json.dumps(["".join(cell["source"]) for cell in cells]),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    printed = json.loads(done.stdout)
    compared = 0
    for cell, text in zip(cells, printed, strict=True):
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        if IGNORED in cell["metadata"].get("tags", []):
            assert "step 60/60  loss 0." in text and "step 60/60  loss 0." in shown
            continue
        assert text == shown
        compared += 1
    assert compared == len(cells) - 1
    # Its last cell deletes its files.
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []
