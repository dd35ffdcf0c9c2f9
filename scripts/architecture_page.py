"""Write the layers in `docs/architecture.md` from the import contract and the code.

python -m scripts.architecture_page           write them
python -m scripts.architecture_page --check   exit 1 if they are out of date
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

PAGE = Path("docs/architecture.md")
_PACKAGE = "torchtitan_lite"
_MAX_LINES = 500
_BEGIN, _END = "<!-- layers: written by `make docs` -->\n", "<!-- end of the layers -->"


def main() -> None:
    """Run the command, in the top folder of a checkout."""
    parser = argparse.ArgumentParser(description="Write the layers in docs/architecture.md.")
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is out of date")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    if problem := _difference_of_long_modules(before):
        sys.exit(problem)
    head, _, rest = before.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    names = _packages()
    after = f"{head}{_BEGIN}\n{_picture(names)}\n\n{_table(names)}\n\n{_END}{tail}"
    if check and after != before:
        sys.exit(f"{PAGE} is out of date: run python -m scripts.architecture_page")
    if not check:
        PAGE.write_text(after, encoding="utf-8")


def _difference_of_long_modules(page: str) -> str:
    """Return how the page's list of long modules differs from those that there are."""
    listed = set(re.findall(r"^\| `(\S+\.py)` \|", page, flags=re.MULTILINE))
    folders = (Path(_PACKAGE), Path("checkpoint"), Path("models"))
    paths = (path for folder in folders for path in folder.rglob("*.py"))
    long = {str(path) for path in paths if path.read_bytes().count(b"\n") > _MAX_LINES}
    problems = {
        f"longer than {_MAX_LINES} lines, and not listed in {PAGE}": long - listed,
        f"listed in {PAGE} as longer than {_MAX_LINES} lines, but not so": listed - long,
    }
    return "; ".join(
        f"{', '.join(sorted(named))}: {problem}" for problem, named in problems.items() if named
    )


def _packages() -> list[str]:
    """Return the packages by their names in this one, those of the highest layer first."""
    settings: dict[str, Any] = tomli.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    names = (name for layer in contract["layers"] for name in layer.split("|"))
    return [name.strip().removeprefix(f"{_PACKAGE}.") for name in names]


def _picture(names: Sequence[str]) -> str:
    """Return a chart of the packages: an arrow for each import that no path of others implies."""
    imported = _imports(names)
    lines = ["```mermaid", "flowchart TD"]
    for name in names:
        inner = ", ".join(_subpackages(name))
        lines.append(f'  {name}["<b>{name}</b>{"<br/>" + inner if inner else ""}"]')
    for name in names:
        implied = {far for near in imported[name] for far in _reached(near, imported)}
        lines += [f"  {name} --> {lower}" for lower in names if lower in imported[name] - implied]
    return "\n".join([*lines, "```"])


def _imports(names: Sequence[str]) -> dict[str, set[str]]:
    """Return which packages each one imports, in functions too."""
    imports: dict[str, set[str]] = {}
    for name in names:
        folder = _folder(name)
        paths = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
        nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8"))))
        modules = (node.module or "" for node in nodes if isinstance(node, ast.ImportFrom))
        packages = {module.split(".")[1] for module in modules if module.startswith(f"{_PACKAGE}.")}
        imports[name] = packages & {*names} - {name}
    return imports


def _reached(name: str, imported: Mapping[str, set[str]]) -> Iterator[str]:
    for lower in imported[name]:
        yield lower
        yield from _reached(lower, imported)


def _table(names: Sequence[str]) -> str:
    lines = ["| part | what it owns |", "|---|---|"]
    for name in names:
        lines.append(f"| **`{name}`** | {_sentence(name)} |")
        lines += [
            f"| `{name}.{inner}` | {_sentence(f'{name}/{inner}')} |" for inner in _inner(name)
        ]
    return "\n".join(lines)


def _inner(name: str) -> list[str]:
    """Return the packages below, and of a package that has any the modules beside them."""
    packages = _subpackages(name)
    modules = [path.stem for path in sorted(_folder(name).glob("[a-z]*.py"))]
    return sorted([*packages, *modules]) if packages else []


def _subpackages(name: str) -> list[str]:
    return sorted(path.parent.name for path in _folder(name).glob("*/__init__.py"))


def _folder(name: str) -> Path:
    return Path(_PACKAGE, name)


def _sentence(name: str) -> str:
    """Return the first sentence of a docstring."""
    folder = _folder(name)
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return first.partition(". ")[0].removesuffix(".").replace("|", "\\|")


if __name__ == "__main__":
    main()
