"""The ways to name checkpoints."""

from pathlib import Path

import pytest

from tests.unit.checkpoint.small_checkpoint import write_checkpoint
from torchtitan_lite.checkpoint.location import find_steps, newest_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output folder of a run with the steps 9 and 10."""
    for step in (9, 10):
        write_checkpoint(tmp_path / "run" / "checkpoint", step)
    return tmp_path / "run"


def test_a_step_its_folder_and_its_run_are_accepted(run: Path) -> None:
    root = f"{run}/checkpoint"
    for path in (f"{run}", f"{run}/", root, f"{root}/"):
        assert find_steps(path) == (root, ["step-9", "step-10"])
        assert newest_step(path) == f"{root}/step-10"
    assert find_steps(f"{root}/step-9/") == (root, ["step-9"])
    assert newest_step(f"{root}/step-9") == f"{root}/step-9"
    assert newest_step(f"file://{run}") == f"file://{root}/step-10"
    (run / "checkpoint" / "step-9").rename(run / "renamed")
    for folder in (f"{run}", f"file://{run}"):
        assert find_steps(f"{folder}/renamed") == (folder, ["renamed"])


def test_relative_paths(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "checkpoint")
    assert newest_step(".") == "./step-10"
    assert find_steps("step-9") == (".", ["step-9"])


@pytest.mark.parametrize("config", ["config.toml", "replica_000/config.toml"])
def test_the_run_knows_where_it_has_saved(config: str, run: Path, tmp_path: Path) -> None:
    (run / "replica_000").mkdir()
    for folder in ("elsewhere", str(tmp_path / "other"), f"file://{tmp_path}/third"):
        place = folder if folder.startswith(("/", "file:")) else f"{run}/{folder}"
        write_checkpoint(place, 3)
        (run / config).write_text(f'[checkpoint]\nfolder = "{folder}"\n')
        assert find_steps(str(run)) == find_steps(f"file://{run}") == (place, ["step-3"])


@pytest.mark.parametrize("text", ["", "[checkpoint]", "checkpoint = 3", "no TOML", "\xff"])
def test_a_damaged_config_is_no_obstacle(text: str, run: Path) -> None:
    (run / "config.toml").write_bytes(text.encode("latin-1"))
    assert newest_step(str(run)) == f"{run}/checkpoint/step-10"


def test_a_folder_without_steps_names_none(tmp_path: Path) -> None:
    assert find_steps(str(tmp_path)) == (str(tmp_path), [])
    assert newest_step(f"{tmp_path}/nothing") == f"{tmp_path}/nothing"
