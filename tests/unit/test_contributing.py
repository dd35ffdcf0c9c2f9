"""The recipes of CONTRIBUTING.md name files and code that exist."""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_RECIPES = (_ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2]
_RECIPES = _RECIPES.partition("\n## ")[0]
_OTHER = {
    *("None", "OSError"),
    *("muon_", "adamw_"),  # Prefixes of keys.
    *("n_embd", "rope_parameters"),  # Keys of config.json.
}
_DEFINITION = re.compile(r"^ *(?:(?:def|class) (\w+)|(?:self\.)?(\w+)(?:: | = ))", re.MULTILINE)


def test_files_exist() -> None:
    named = re.findall(r"`([\w./]+(?:\.\w+|/))`", _RECIPES)
    named = [name for name in named if "/" in name or name.endswith((".md", ".toml"))]
    assert len(named) > 60
    places = [_ROOT, _ROOT / "torchtitan_lite"]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert missing == []


def test_functions_classes_and_constants_exist() -> None:
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)(?:\(\.\.\.\))?`", _RECIPES))
    named = {name for name in named if not name.endswith((".md", ".toml"))} - _OTHER
    assert len(named) > 50
    defined = _defined()
    missing = {name for name in named if not set(name.split(".")) <= defined}
    assert missing == set()


def _defined() -> set[str]:
    """Return the names of modules, functions, classes, variables and fields."""
    names: set[str] = set()
    for folder in ("torchtitan_lite", "checkpoint", "models", "tests"):
        for path in (_ROOT / folder).rglob("*.py"):
            names.add(path.stem)
            for groups in _DEFINITION.findall(path.read_text(encoding="utf-8")):
                names.update(groups)
    return names
