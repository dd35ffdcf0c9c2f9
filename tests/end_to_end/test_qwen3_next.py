"""A small Qwen3-Next: trained, resumed on other degrees, generated from, and exported to a folder
that transformers loads."""

from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.hugging_face import assert_loads_in_transformers
from tests.harness.jobs import FIXTURE
from tests.harness.tolerances import PRETRAINED_DELTA
from torchtitan_lite.cli import main


@pytest.mark.matrix
def test_a_run_moves_to_other_degrees_and_to_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--config=configs/qwen3_next_debug.toml",
        f"--job.dump_folder={tmp_path / 'run'}",
        f"--training.cache_folder={tmp_path / 'cache'}",
        f"--training.dataset_path={FIXTURE}",
        "--training.held_out_fraction=0",
        "--training.seq_len=64",
        "--training.local_batch_size=2",
        "--validation.enable=false",
        "--metrics.enable_tensorboard=false",
        "--lr_scheduler.total_steps=100",
        "--job.device=cpu",
    ]
    experts = [*arguments, "--parallelism.expert_parallel_degree=2", "--training.steps=3"]
    launch.run(2, experts, tmp_path / "experts")
    stages = [*arguments, "--parallelism.pipeline_parallel_degree=2", "--training.steps=6"]
    assert "step 3" in launch.run(2, stages, tmp_path / "stages")
    losses = [line["loss"] for line in launch.steps_of(tmp_path / "run")]
    assert len(losses) == 6 and losses[-1] < losses[0]

    checkpoint = str(tmp_path / "run" / "checkpoint" / "step-6")
    assert main(["generate", checkpoint, "--prompt", "def ", "--max-new-tokens", "4"]) == 0
    assert "def " in capsys.readouterr().out
    assert main(["convert", "to-hf", checkpoint, str(tmp_path / "hf")]) == 0
    assert_loads_in_transformers(tmp_path / "hf", 2048, PRETRAINED_DELTA)
