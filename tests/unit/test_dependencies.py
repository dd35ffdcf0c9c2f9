"""The declared dependencies are exactly those that the shipped modules import."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_lite.optional_dependencies import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "prometheus_client": "prometheus-client",
    "tomli_w": "tomli-w",
}
"""Maps an import name to the name on PyPI, if they differ."""
PLUGINS = {"py-spy", "s3fs", "tensorboard"}
"""Not imported by name: fsspec opens s3:// through s3fs, the launcher runs py-spy, and torch
imports tensorboard."""


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
    """Yield the distributions that a module imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _distributions(node)


def _top_level_imports(path: Path) -> Iterator[str]:
    """Yield the distributions that a module imports when it is imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _distributions(node)


def _distributions(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    modules = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        modules = [node.module] if node.module else []
    for module in modules:
        top = module.partition(".")[0]
        if top not in sys.stdlib_module_names | {"torchtitan_lite", "scripts", "_typeshed"}:
            yield DISTRIBUTIONS.get(top, top).replace("_", "-")


def _imported() -> dict[str, Path]:
    return {name: path for path in _shipped() for name in _imports(path)}


def test_every_import_is_declared():
    declared = REQUIRED.union(*OPTIONAL.values())
    undeclared = {name: path for name, path in _imported().items() if name not in declared}
    assert not undeclared


def test_an_extra_is_imported_where_it_is_used():
    """Modules that every run imports need no optional package."""
    needs_extra = {
        str(path.relative_to(ROOT)).partition("/")[2]
        for path in _shipped()
        for name in _top_level_imports(path)
        if name not in REQUIRED
    }
    assert needs_extra == {
        "lighthouse/servicer.py",
        "lighthouse/client.py",
        "lighthouse/messages.py",
        "lighthouse/server.py",
        "publish/vllm_engine.py",
        "rendezvous/link.py",
        "rendezvous/server.py",
        "replica/coordinator.py",
        "replica/lighthouse_link.py",
        "replica/semi_synchronous.py",
        "replica/healing/transport.py",
        "replica/torchft_manager.py",
        "rpc/client.py",
        "rpc/gate.py",
        "rpc/server.py",
    }


def test_every_declared_dependency_is_imported():
    declared = REQUIRED.union(*OPTIONAL.values())
    # wandb is imported with import_module, so that type checkers do not need it.
    assert declared - _imported().keys() - PLUGINS - {"wandb"} == set()


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
