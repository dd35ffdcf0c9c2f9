"""All sites of the mutation operators in the product, and modules with one of them mutated."""

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.mutants.general import GENERAL, general_mutations, generally_mutated
from tests.mutants.operators import OPERATORS
from tests.mutants.tree import Edit, Function, Tree

REPOSITORY = Path(__file__).parent.parent.parent
PACKAGE = "torchtitan_lite"
_OUT_OF_SCOPE = {"estimate", "failure_model", "report", "vllm_plugin", "vllm_engine"}
"""Parts of the product without a part in a run, and what runs only inside of another engine."""
_PURE = {
    *("layout", "partition", "placements", "plan", "read_plan", "transfers", "intersections"),
    *(
        "rules",
        "replica_coordinator",
        "resize_coordinator",
        "replica_server",
        "order",
        "pipeline_order",
    ),
    *("packing", "batch_sizes", "progress", "save_plan"),
}
"""Modules of pure decisions, which general operators mutate as well."""
_MAX_SHOWN = 120


@dataclass(frozen=True)
class Site:
    """A place where an operator applies."""

    id: str
    """Does not depend on the path of the module, nor on code outside of the function."""
    operator: str
    module: str
    mutation: str
    """What `mutated` applies: the index of an edit, or a general operator and its occurrence."""
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
    """Return the sites of the whole product, those of a module one after the other."""
    seen: Counter[str] = Counter()
    sites = []
    for module, path in modules().items():
        for site, _ in sites_of(module, path.read_text()):
            seen[site.id] += 1
            key = f"{site.id}|{seen[site.id]}".encode()
            sites.append(replace(site, id=hashlib.sha256(key).hexdigest()[:12]))
    return sites


def sites_of(module: str, source: str) -> Iterator[tuple[Site, tuple[int, int]]]:
    """Yield each site of a module, with the place of the statement whose execution reaches it.
    Sites that look the same in functions of one name share an id."""
    tree = ast.parse(source)
    for index, (function, operator, _, edit) in enumerate(_edits(tree)):
        line = getattr(edit.replacements[0][0], "lineno", edit.statement.lineno)
        before, after = edit.before, edit.after
        yield (
            _site(operator, module, str(index), function, line, before, after),
            _place(edit.statement),
        )
    if module.rpartition(".")[2] in _PURE:
        for mutation in general_mutations(source, _functions(tree)):
            yield (
                _site(
                    GENERAL,
                    module,
                    mutation.name,
                    mutation.function,
                    mutation.line,
                    mutation.before,
                    mutation.name.partition("/")[2].partition(":")[0],
                ),
                _place(mutation.statement),
            )


def draw(sites: list[Site], seed: int, per_operator: int) -> list[Site]:
    """Draw `per_operator` sites of each operator, or all if there are fewer; four times as many of
    the general ones. Changes of other code do not change the draw."""
    drawn = []
    for operator in (*(operator.name for operator in OPERATORS), GENERAL):
        candidates = [site for site in sites if site.operator == operator]
        candidates.sort(key=lambda site: hashlib.sha256(f"{seed}:{site.id}".encode()).digest())
        drawn += candidates[: per_operator * (4 if operator == GENERAL else 1)]
    return drawn


def mutated(source: str, mutation: str) -> ast.Module:
    """Return the tree of a module with one mutation."""
    if not mutation.isdigit():
        return ast.parse(generally_mutated(source, mutation))
    module = ast.parse(source)
    for index, (_, _, tree, edit) in enumerate(_edits(module)):
        if index == int(mutation):
            tree.apply(edit)
            return ast.fix_missing_locations(module)
    raise IndexError(f"the module has no site {mutation}")


def save(sites: list[Site], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(site)) + "\n" for site in sites))


def load(path: Path) -> list[Site]:
    return [Site(**json.loads(line)) for line in path.read_text().splitlines()]


def _edits(module: ast.Module) -> Iterator[tuple[str, str, Tree, Edit]]:
    """Yield the qualified name of the outermost function, the operator, the tree of the function,
    and the edit of each site of a module."""
    for function, name in _functions(module):
        tree = Tree(function)
        for operator in OPERATORS:
            for edit in list(operator.find(tree)):
                yield name, operator.name, tree, edit


def _site(
    operator: str, module: str, mutation: str, function: str, line: int, before: str, after: str
) -> Site:
    key = f"{operator}|{function}|{before}|{after}".encode()
    digest = hashlib.sha256(key).hexdigest()
    return Site(digest, operator, module, mutation, function, line, _short(before), _short(after))


def _place(statement: ast.stmt) -> tuple[int, int]:
    return statement.lineno, statement.col_offset


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
