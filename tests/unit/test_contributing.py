"""The recipes of CONTRIBUTING.md name files and functions that exist."""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_RECIPES = (_ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2]
_RECIPES = _RECIPES.partition("\n## ")[0]


def test_files_exist() -> None:
    named = re.findall(r"`([\w./]+(?:\.py|/))`", _RECIPES)
    assert len(named) > 15
    places = [_ROOT, _ROOT / "torchtitan_lite"]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert missing == []


def test_functions_exist() -> None:
    code = "\n".join(
        path.read_text()
        for folder in ("torchtitan_lite", "checkpoint", "models", "tests/parity")
        for path in (_ROOT / folder).rglob("*.py")
    )
    for name in ("parallelize", "open_metrics", "open_storage"):
        assert f"`{name}`" in _RECIPES and f"def {name}(" in code
    assert "`_ELEMENT_WISE`" in _RECIPES and "\n_ELEMENT_WISE" in code
    assert "`MESHES`" in _RECIPES and "\nMESHES" in code
