"""An invalid config ends with exit status 1 and one clear error, before anything starts."""

from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.ranks import run_command

WRONG = {
    "unknown key": (["--training.step=3"], "Did you mean training.steps"),
    "degrees that do not multiply": (
        ["--parallelism.data_parallel_shard_degree=3"],
        "set data_parallel_shard_degree = 1, or start 3 processes",
    ),
    "missing data": (["--training.dataset_path=/nowhere.jsonl"], "/nowhere.jsonl"),
    "unknown flavor": (["--model.flavor=8b"], 'Did you mean "8B"'),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_config(case: str, tmp_path: Path) -> None:
    overrides, needed = WRONG[case]
    arguments = [*launch.SMALL, f"--job.dump_folder={tmp_path / 'run'}", *overrides]
    text = run_command("train", *arguments, status=1)
    assert needed in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_missing_config_file_lists_existing_files(tmp_path: Path) -> None:
    text = launch.run(1, ["--config=configs/lama3_debug.toml"], tmp_path / "log", status=1)
    assert "llama3_debug.toml" in text
    assert "Traceback" not in text


def test_two_processes_report_an_error_once(tmp_path: Path) -> None:
    text = launch.run(2, [*launch.SMALL, "--training.step=3"], tmp_path / "log", status=1)
    assert text.count("Did you mean training.steps") == 1
