"""Packages whose public names are imported when they are first used."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from torchtitan_lite import checkpoint, data


@pytest.fixture(params=[checkpoint, data], ids=["checkpoint", "data"])
def package(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def test_the_lists_of_a_package_agree(package: ModuleType) -> None:
    """Under TYPE_CHECKING, by module, and in `__all__`."""
    assert package.__file__ is not None
    body = ast.parse(Path(package.__file__).read_text()).body
    (block,) = (node for node in body if isinstance(node, ast.If))
    typed = _imported(block.body, package.__name__)
    lazy = {(module, name) for module, names in package._MODULES.items() for name in names}
    assert set(typed) == lazy
    assert len(list(typed)) == len(lazy) == sum(map(len, package._MODULES.values()))
    eager = _imported(body, package.__name__)
    assert package.__all__ == sorted({name for _, name in (*typed, *eager)}, key=_order)


def test_every_public_name_can_be_imported(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'x'"):
        _ = package.x


def _imported(body: list[ast.stmt], package: str) -> list[tuple[str, str]]:
    """Return the modules of the package that statements import from, with the names."""
    return list(_names(body, f"{package}."))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            assert node.module is not None
            yield from ((node.module.removeprefix(prefix), alias.name) for alias in node.names)


def _order(name: str) -> tuple[bool, bool, str]:
    """Return the key by which ruff sorts `__all__`: constants, classes, then the others."""
    return not name.isupper(), not name[0].isupper(), name
