"""Other packages import the checkpoint package only by its public names."""

import ast
import subprocess
import sys
from pathlib import Path

_TOP = Path(__file__).parents[3]
_PACKAGE = "torchtitan_lite.checkpoint"
_SUBPACKAGES = (
    *("background", "shared_memory", "storage"),
    *("convert", "convert.hugging_face", "convert.dcp"),
)
_ALLOWED = {_PACKAGE, *(f"{_PACKAGE}.{name}" for name in _SUBPACKAGES)}
_TORCH_FREE = [
    _PACKAGE,
    *(f"{_PACKAGE}.{name}" for name in ("background", "shared_memory", "storage")),
]


def test_no_outside_import_of_a_module_of_the_package() -> None:
    deep = [
        f"{path.relative_to(_TOP)}: {module}"
        for path in sorted([*(_TOP / "torchtitan_lite").rglob("*.py"), *_TOP.glob("scripts/*.py")])
        if "checkpoint" not in path.relative_to(_TOP).parts
        for module in _imported(path)
        if module.startswith(f"{_PACKAGE}.") and module not in _ALLOWED
    ]
    assert not deep, "import from torchtitan_lite.checkpoint or one of its subpackages"


def test_the_package_and_its_torch_free_subpackages_import_no_torch() -> None:
    code = f"import sys, {', '.join(_TORCH_FREE)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=_TOP, check=True)


def _imported(path: Path) -> list[str]:
    result = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            is_package = node.module in _ALLOWED
            modules = [f"{node.module}.{name.name}" for name in node.names]
            result += [m for m in modules if _is_module(m)] if is_package else [node.module]
        elif isinstance(node, ast.Import):
            result += [name.name for name in node.names]
    return result


def _is_module(name: str) -> bool:
    return (_TOP / name.replace(".", "/")).with_suffix(".py").is_file()
