"""All sites of the mutation operators in the product, and modules with one of them mutated."""

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.operators import OPERATORS
from tests.mutants.tree import Edit, Function, Tree

REPOSITORY = Path(__file__).parent.parent.parent
PACKAGE = "torchtitan_lite"
_OUT_OF_SCOPE = {"estimate", "failure_model", "report", "vllm_plugin", "vllm_engine"}
"""Parts of the product without a part in a run, and what runs only inside of another engine."""
_MAX_SHOWN = 120


@dataclass(frozen=True)
class Site:
    """A place where an operator applies."""

    id: str
    """Does not depend on the path of the module, nor on code outside of the function."""
    operator: str
    module: str
    index: int
    """Position among the sites of the module."""
    function: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: `{self.before}` -> `{self.after}`"


def modules() -> dict[str, Path]:
    """Return the path of each module of the product by its dotted name."""
    root = REPOSITORY / PACKAGE
    paths = {}
    for path in sorted(_python_files(root)):
        parts = (PACKAGE, *path.relative_to(root).with_suffix("").parts)
        if not _OUT_OF_SCOPE & set(parts):
            paths[".".join(parts).removesuffix(".__init__")] = path
    return paths


def all_sites() -> list[Site]:
    """Return the sites of the whole product."""
    seen: Counter[str] = Counter()
    sites = []
    for module, path in modules().items():
        for index, (function, operator, _, edit) in enumerate(edits(ast.parse(path.read_text()))):
            before, after = edit.before, edit.after
            key = f"{operator}|{function}|{before}|{after}"
            seen[key] += 1
            digest = hashlib.sha256(f"{key}|{seen[key]}".encode()).hexdigest()[:12]
            line = getattr(edit.replacements[0][0], "lineno", edit.statement.lineno)
            shown = (_short(before), _short(after))
            sites.append(Site(digest, operator, module, index, function, line, *shown))
    return sites


def draw(sites: list[Site], seed: int, per_operator: int) -> list[Site]:
    """Draw `per_operator` sites of each operator, or all if there are fewer. Changes of other code
    do not change the draw."""
    drawn = []
    for operator in OPERATORS:
        candidates = [site for site in sites if site.operator == operator.name]
        candidates.sort(key=lambda site: hashlib.sha256(f"{seed}:{site.id}".encode()).digest())
        drawn += candidates[:per_operator]
    return drawn


def edits(module: ast.Module) -> Iterator[tuple[str, str, Tree, Edit]]:
    """Yield the qualified name of the outermost function, the operator, the tree of the function,
    and the edit of each site of a module."""
    for function, name in _functions(module):
        tree = Tree(function)
        for operator in OPERATORS:
            for edit in list(operator.find(tree)):
                yield name, operator.name, tree, edit


def mutated(source: str, index: int) -> ast.Module:
    """Return the tree of a module with the mutation of its site `index`."""
    module = ast.parse(source)
    for number, (_, _, tree, edit) in enumerate(edits(module)):
        if number == index:
            tree.apply(edit)
            return ast.fix_missing_locations(module)
    raise IndexError(f"the module has no site {index}")


def save(sites: list[Site], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(site)) + "\n" for site in sites))


def load(path: Path) -> list[Site]:
    return [Site(**json.loads(line)) for line in path.read_text().splitlines()]


def _python_files(folder: Path) -> Iterator[Path]:
    # Some folders of the package are links.
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _functions(module: ast.Module) -> Iterator[tuple[Function, str]]:
    for node in module.body:
        if isinstance(node, Function):
            yield node, node.name
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, Function):
                    yield child, f"{node.name}.{child.name}"


def _short(source: str) -> str:
    line = " ".join(source.split())
    return line if len(line) <= _MAX_SHOWN else f"{line[: _MAX_SHOWN - 3]}..."
