"""The two linked folders: a clear error if the links are lost, or if a folder is imported under
another name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.core._links import LINKED_FOLDERS, refuse_other_name, require_links

_REPOSITORY = Path(__file__).parents[2]
_PACKAGE = _REPOSITORY / "torchtitan_lite"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package without its links, as some archivers leave it."""
    package = tmp_path / "torchtitan_lite"
    (package / "core").mkdir(parents=True)
    for name in ("__init__.py", "core/__init__.py", "core/_links.py"):
        shutil.copy(_PACKAGE / name, package / name)
    return package


def test_this_checkout_has_its_links() -> None:
    require_links()
    for name in LINKED_FOLDERS:
        assert (_PACKAGE / name).is_symlink()


def test_a_checkout_without_links_says_how_to_restore_them(copied: Path) -> None:
    done = _python("import torchtitan_lite", copied.parent)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: This checkout lost its symbolic links: torchtitan_lite/models "
        "torchtitan_lite/checkpoint should point to ../models, ../checkpoint. Restore them with "
        "`git config core.symlinks true && git checkout -- torchtitan_lite/models "
        "torchtitan_lite/checkpoint`, or on a system without symbolic links install the wheel."
    )


def test_a_link_that_git_wrote_as_text_counts_as_lost(copied: Path) -> None:
    (copied / "models").write_text("../models")
    (copied / "checkpoint").symlink_to(_REPOSITORY / "checkpoint")
    with pytest.raises(
        ImportError, match=r"lost its symbolic links: torchtitan_lite/models should"
    ):
        require_links(copied)


@pytest.mark.parametrize("name", LINKED_FOLDERS)
def test_the_bare_name_is_rejected(name: str) -> None:
    done = _python(f"import {name}", _REPOSITORY)
    assert done.returncode != 0
    assert f"ImportError: Import this package as torchtitan_lite.{name}, not as {name}:" in (
        done.stderr
    )
    refuse_other_name(f"torchtitan_lite.{name}")


@pytest.mark.parametrize("name", LINKED_FOLDERS)
def test_ruff_bans_the_bare_name(name: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    done = subprocess.run(
        [*command, "--stdin-filename", str(_REPOSITORY / "snippet.py"), "-"],
        input=f"import {name}\n\nprint({name})\n",
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"TID251 `{name}` is banned: Import torchtitan_lite.{name}" in done.stdout


def _python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
