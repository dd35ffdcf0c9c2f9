"""Imports modules of the product with one mutation, or so that they record the sites that they
reach. Started by `site/sitecustomize.py` in every Python process of a mutation test.

`MUTANT=MODULE:MUTATION` mutates a site. `MUTANT_BASES=FILE` records sites; that JSON file has the
position of the first site of each module. They are recorded in the file `MUTANT_HITS`, one byte
each, which all processes of a test map into memory.
"""

import ast
import json
import marshal
import mmap
import os
import sys
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_REACHED = "_reached_site"


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("torchtitan_lite"):
            return None
        wanted = os.environ.get("MUTANT", "").partition(":")[0]
        if "MUTANT_BASES" not in os.environ and wanted != name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            is_mutated = wanted == name
            spec.loader = (_Mutating if is_mutated else _Recording)(name, spec.loader.path)
        return spec


class _Mutating(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        from tests.mutants.sites import mutated

        mutation = os.environ["MUTANT"].partition(":")[2]
        tree = mutated(Path(self.path).read_text(), mutation)
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Recording(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path)
        folder = Path(os.environ["MUTANT_BASES"]).parent
        cached = folder / "code" / f"{fullname}-{source.stat().st_mtime_ns}"
        if cached.exists():
            return marshal.loads(cached.read_bytes())
        code = compile(recording(source.read_text(), fullname), self.path, "exec", 0, True)
        cached.parent.mkdir(exist_ok=True)
        draft = cached.with_suffix(f".{os.getpid()}")
        draft.write_bytes(marshal.dumps(code))
        draft.rename(cached)
        return code


def install() -> None:
    """Import modules of the product through this module from now on."""
    sys.meta_path.insert(0, _Finder())


def recording(source: str, module: str) -> ast.Module:
    """Return the tree of a module that calls `reached` before the statement of each site."""
    from tests.mutants.sites import sites_of

    first = bases().get(module)
    tree = ast.parse(source)
    if first is None:
        return tree
    calls: dict[tuple[int, int], list[int]] = {}
    for index, (_, place) in enumerate(sites_of(module, source)):
        calls.setdefault(place, []).append(first + index)
    for node in ast.walk(tree):
        for name, block in ast.iter_fields(node):
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(node, name, _with_calls(block, calls))
    # Behind the docstring and imports from __future__.
    place = next(
        (index for index, one in enumerate(tree.body) if not _is_preamble(one)), len(tree.body)
    )
    name = ast.alias("reached", _REACHED)
    tree.body.insert(place, ast.ImportFrom("tests.mutants.imports", [name], 0))
    return ast.fix_missing_locations(tree)


def reached(*positions: int) -> None:
    """Record that the sites at `positions` are executed. Nothing is recorded while a graph is
    captured."""
    compiler = sys.modules.get("torch.compiler")
    path = os.environ.get("MUTANT_HITS")
    if path is not None and (compiler is None or not compiler.is_compiling()):
        hits = hit_map(path)
        for position in positions:
            hits[position] = 1


@cache
def hit_map(path: str) -> mmap.mmap:
    """Return the map of the file of hits."""
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def bases() -> dict[str, int]:
    return _bases_in(os.environ["MUTANT_BASES"])


@cache
def _bases_in(file: str) -> dict[str, int]:
    return json.loads(Path(file).read_text())


def _is_preamble(statement: ast.stmt) -> bool:
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or (
        isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    )


def _with_calls(block: list[ast.stmt], calls: dict[tuple[int, int], list[int]]) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    for statement in block:
        positions = calls.get((statement.lineno, statement.col_offset))
        if positions:
            arguments: list[ast.expr] = [ast.Constant(position) for position in positions]
            call = ast.Call(ast.Name(_REACHED, ast.Load()), arguments, [])
            statements.append(ast.copy_location(ast.Expr(call), statement))
        statements.append(statement)
    return statements
