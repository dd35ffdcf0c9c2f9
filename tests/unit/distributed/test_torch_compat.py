"""Private APIs of torch are used in `torch_compat` only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_TORCH_COMPAT = _ROOT / "torchtitan_lite/distributed/torch_compat.py"
_METHODS = ("_set_", "_register_")
"""Beginnings of private methods of process groups and backends, which no name of torch precedes."""


def _shipped() -> Iterator[Path]:
    yield _ROOT / "train.py"
    for folder in ("torchtitan_lite", "checkpoint", "models", "scripts"):
        yield from (_ROOT / folder).rglob("*.py")


def _private_uses(source: str) -> list[str]:
    """Return the private names of torch that a module uses. Those of operators do not count:
    `torch.ops` has no others for some kernels."""
    tree = ast.parse(source)
    uses, aliases = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_torch(alias.name):
                    aliases.add(alias.asname or "torch")
                    uses += [alias.name] if _is_private(alias.name) else []
        elif isinstance(node, ast.ImportFrom) and _is_of_torch(node.module or ""):
            for alias in node.names:
                aliases.add(alias.asname or alias.name)
                name = f"{node.module}.{alias.name}"
                uses += [name] if _is_private(name) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            is_own = owner in ("self", "cls", "super()")
            is_of_torch = owner.partition(".")[0] in aliases and not owner.startswith("torch.ops.")
            if is_of_torch or (node.attr.startswith(_METHODS) and not is_own):
                uses.append(f"{owner}.{node.attr}")
    return uses


def _is_of_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def test_private_apis_of_torch_are_used_in_one_module() -> None:
    assert len(_private_uses(_TORCH_COMPAT.read_text())) > 20
    uses = {
        str(path.relative_to(_ROOT)): private
        for path in _shipped()
        if path != _TORCH_COMPAT and (private := _private_uses(path.read_text()))
    }
    assert uses == {}


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("import torch\ntorch._dynamo.config.x = 1", ["torch._dynamo"]),
        ("import torch.distributed as dist\ndist.Work._x()", ["dist.Work._x"]),
        ("from torch import _C", ["torch._C"]),
        ("import torch._inductor.config", ["torch._inductor.config"]),
        ("from torch.distributed import distributed_c10d as c\nc._world", ["c._world"]),
        ("group._register_backend(device)", ["group._register_backend"]),
        ("import torch\ntorch.ops.aten._scaled_mm.default; torch.__version__", []),
        ("self._set_value(1); super()._set_value(1); other._x", []),
    ],
)
def test_a_private_name_is_found(source: str, uses: list[str]) -> None:
    assert _private_uses(source) == uses
