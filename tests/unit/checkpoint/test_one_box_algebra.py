"""checkpoint/ has no layout arithmetic of its own: it imports the planner, and no function that
could replace it."""

import ast
from pathlib import Path

import pytest

import torchtitan_lite

_FOLDER = Path(torchtitan_lite.__file__).parent / "checkpoint"
# DCP's chunks are arbitrary boxes: there is no layout for the planner.
_MODULES = sorted(set(_FOLDER.rglob("*.py")) - set(_FOLDER.glob("convert/dcp/*")))
_PLANNER = {
    "torchtitan_lite.distributed.redistribute",
    "torchtitan_lite.distributed.redistribute.execution.read_plan",
    "torchtitan_lite.distributed.redistribute.planning.layout",
    "torchtitan_lite.distributed.redistribute.planning.placements",
}
_PLANNERS_OWN = {"Box", "intervals", "overlap", "partition"}
_TORCHS = "torch.distributed.tensor"


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_FOLDER)))
def test_no_box_arithmetic_is_imported(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module, names = node.module or "", {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            module, names = node.names[0].name, set()
        else:
            continue
        assert not module.startswith(_TORCHS) or names == {"DTensor"}, module
        if module.startswith("torchtitan_lite.distributed.redistribute"):
            assert module in _PLANNER, module
            assert not names & _PLANNERS_OWN, names
