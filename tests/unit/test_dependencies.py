"""The declared dependencies are exactly those that the shipped modules import."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from torchtitan_lite.core.optional_dependencies import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "prometheus_client": "prometheus-client",
    "tomli_w": "tomli-w",
}
"""Maps an import name to the name on PyPI, if they differ."""
PLUGINS = {"py-spy", "s3fs"}
"""Not imported: fsspec opens s3:// through s3fs, and the launcher runs py-spy."""
BY_NAME = {"import_module", "find_spec", "__import__"}
"""Functions whose first argument names a module that is imported."""
OF_A_USER = {
    "torchtitan_lite/cli/__init__.py",
    "torchtitan_lite/config/custom_tables.py",
    "models/__init__.py",
    "torchtitan_lite/core/lazy_names.py",
    "torchtitan_lite/core/optional_dependencies.py",
    "torchtitan_lite/core/registry.py",
}
"""Files that import modules named by variables: a user's, those of this package, and optional
packages, which `require` and `missing` name."""


def _names(requirements: list[str]) -> set[str]:
    return {_name(one) for one in requirements}


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match[0].lower().replace("_", "-")


REQUIRED = _names(PROJECT["dependencies"])
OPTIONAL = {k: _names(v) for k, v in PROJECT["optional-dependencies"].items() if k != "dev"}


def _shipped() -> Iterator[Path]:
    yield ROOT / "train.py"
    for folder in ("torchtitan_lite", "checkpoint", "models", "scripts"):
        yield from (ROOT / folder).rglob("*.py")


def _imports(path: Path) -> Iterator[str]:
    """Yield the distributions that a module imports, in functions and by name too. Raises
    AssertionError for an import by a name that the source does not show."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _distributions(_modules(node))
        elif isinstance(node, ast.Call) and node.args and _name_of(node.func) in BY_NAME:
            yield from _distributions(_named_modules(node.args[0], tree, path))


def _top_level_imports(path: Path) -> Iterator[str]:
    """Yield the distributions that a module imports when it is imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _distributions(_modules(node))


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module else []
    return [alias.name for alias in node.names]


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _named_modules(name: ast.expr, tree: ast.Module, path: Path) -> list[str]:
    """Return the modules that an expression may name: a constant, the beginning of an f-string, or
    a variable of a loop over constants."""
    if isinstance(name, ast.JoinedStr):
        first = name.values[0]
        if isinstance(first, ast.FormattedValue) and _name_of(first.value) == "__name__":
            return ["torchtitan_lite"]
        name = first
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        return [name.value]
    if isinstance(name, ast.Name):
        loops = (one for one in ast.walk(tree) if isinstance(one, ast.For))
        for loop in loops:
            inside = any(node is name for node in ast.walk(loop))
            if inside and isinstance(loop.iter, ast.Tuple | ast.List | ast.Set | ast.Dict):
                entries = loop.iter.keys if isinstance(loop.iter, ast.Dict) else loop.iter.elts
                return [str(one.value) for one in entries if isinstance(one, ast.Constant)]
    where = str(path.relative_to(ROOT))
    assert where in OF_A_USER, f"{where} imports {ast.unparse(name)}, which has no constant name"
    return []


def _distributions(modules: Iterable[str]) -> Iterator[str]:
    for module in modules:
        top = module.partition(".")[0]
        if top not in sys.stdlib_module_names | {"torchtitan_lite", "scripts", "_typeshed"}:
            yield DISTRIBUTIONS.get(top, top).replace("_", "-")


@functools.cache
def _imported() -> dict[str, Path]:
    return {name: path for path in _shipped() for name in _imports(path)}


def test_every_import_is_declared():
    declared = REQUIRED.union(*OPTIONAL.values())
    undeclared = {name: path for name, path in _imported().items() if name not in declared}
    assert not undeclared


@pytest.mark.parametrize(
    "line",
    [
        "import undeclared",
        "def f():\n  from undeclared.a import b",
        "import_module('undeclared.a')",
        "importlib.import_module(f'undeclared.{name}')",
        "for name in ('torch', 'undeclared'):\n  import_module(name)",
        "find_spec('undeclared')",
    ],
)
def test_every_way_to_import_is_seen(line: str, tmp_path: Path):
    (tmp_path / "module.py").write_text(line)
    assert "undeclared" in set(_imports(tmp_path / "module.py"))


def test_an_import_by_a_variable_is_reported(monkeypatch: pytest.MonkeyPatch):
    path = ROOT / "torchtitan_lite" / "module.py"
    monkeypatch.setattr(Path, "read_text", lambda self: "import_module(name)")
    with pytest.raises(AssertionError, match="no constant name"):
        list(_imports(path))


def test_an_extra_is_imported_where_it_is_used():
    """Modules that every run imports need no optional package."""
    needs_extra = {
        str(path.relative_to(ROOT)).partition("/")[2]
        for path in _shipped()
        for name in _top_level_imports(path)
        if name not in REQUIRED
    }
    assert needs_extra == {
        "fault_tolerance/lighthouse/servicer.py",
        "fault_tolerance/lighthouse/client.py",
        "fault_tolerance/lighthouse/messages.py",
        "fault_tolerance/lighthouse/server.py",
        "serving/publish/vllm_engine.py",
        "fault_tolerance/supervision/coordinator/client.py",
        "fault_tolerance/supervision/coordinator/remote_link.py",
        "fault_tolerance/supervision/coordinator/server.py",
        "fault_tolerance/replica/replica_server.py",
        "fault_tolerance/replica/lighthouse_link.py",
        "fault_tolerance/replica/semi_synchronous.py",
        "fault_tolerance/replica/healing/transport.py",
        "fault_tolerance/replica/torchft_manager.py",
        "distributed/rpc/client.py",
        "distributed/rpc/gate.py",
        "distributed/rpc/server.py",
    }


def test_every_declared_dependency_is_imported():
    declared = REQUIRED.union(*OPTIONAL.values())
    assert declared - _imported().keys() - PLUGINS == set()


def test_every_extra_has_its_error():
    """Each optional package names the extra that declares it."""
    for package, extra in EXTRAS.items():
        top = package.partition(".")[0]
        assert DISTRIBUTIONS.get(top, top).replace("_", "-") in OPTIONAL[extra]


@pytest.mark.parametrize("extra", ["ft", "report"])
def test_the_requirements_file_pins_what_a_run_needs(extra: str):
    """`make train` and the replicas of the README need no other file."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all("==" in line for line in pinned)
    assert REQUIRED | OPTIONAL[extra] <= _names(pinned)


def test_nothing_is_pinned_twice():
    """A package of the run in requirements-dev.txt would hide that requirements.txt lacks it."""
    files = [(ROOT / name).read_text() for name in ("requirements.txt", "requirements-dev.txt")]
    run, dev = ({_name(line) for line in text.splitlines() if "==" in line} for text in files)
    assert not run & dev
