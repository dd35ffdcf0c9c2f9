"""A small DeepSeek-V3 with multi-token prediction, trained with Muon on FSDP x TP x EP: it survives
a kill, resumes on other degrees, generates, and is exported to a folder that transformers loads."""

from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.hugging_face import assert_loads_in_transformers
from tests.harness.jobs import FIXTURE
from tests.harness.tolerances import FAULTS_FLOAT64, PRETRAINED_LOGITS
from tests.resilience.test_launch import REPLICAS, killed_at_exit, losses, output_of, rank_of
from torchtitan_lite.cli import main

_STEPS = 60


def _arguments(folder: Path, steps: int, *more: str) -> list[str]:
    return [
        "--config=configs/deepseek_v3_debug.toml",
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        "--lr_scheduler.total_steps=1000",
        "--training.cache_folder=" + str(folder.parent / "cache"),
        f"--training.dataset_path={FIXTURE}",
        "--training.held_out_fraction=0",
        "--training.seq_len=64",
        "--training.local_batch_size=2",
        "--training.global_batch_size=4",
        "--validation.enable=false",
        "--metrics.enable_tensorboard=false",
        "--metrics.log_freq=1",
        "--checkpoint.enable=true",
        "--checkpoint.ram_interval=1",
        "--job.device=cpu",
        "--optimizer.name=Muon",
        *more,
    ]


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_a_run_survives_a_kill_and_moves_to_other_degrees_and_to_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = [
        "--training.dtype=float64",
        *(
            f"--parallelism.{kind}=2"
            for kind in (
                "data_parallel_shard_degree",
                "tensor_parallel_degree",
                "expert_parallel_degree",
            )
        ),
    ]
    run, log = tmp_path / "run", tmp_path / "log"
    launcher = ("-m", "torchtitan_lite", "launch", "--replicas=1", "--nproc-per-replica=4", "--")
    process = launch.start(1, _arguments(run, _STEPS, *mesh), log, program=launcher)
    with killed_at_exit(process, run):
        launch.wait_for_step(run / REPLICAS[0], 20, process, log, timeout_s=300)
        rank_of(run, 0, 3).kill()
        text = output_of(process, log, timeout_s=500)
    assert "restarts in" in text
    assert f"step {_STEPS}" in text
    undisturbed = tmp_path / "undisturbed"
    launch.run(4, _arguments(undisturbed, 30, *mesh), tmp_path / "undisturbed.log")
    actual, expected = losses(run), losses(undisturbed)
    assert len(expected) == 30 and len(actual) == _STEPS
    assert {step: actual[step] for step in expected} == pytest.approx(expected, rel=FAULTS_FLOAT64)
    assert actual[_STEPS] < 0.8 * actual[1]

    stages = _arguments(run, _STEPS + 3, "--parallelism.pipeline_parallel_degree=2")
    assert f"step {_STEPS + 3}" in launch.run(2, stages, tmp_path / "stages")
    checkpoint = str(run / "checkpoint" / f"step-{_STEPS + 3}")
    assert main(["generate", checkpoint, "--prompt", "def ", "--max-new-tokens", "4"]) == 0
    assert "def " in capsys.readouterr().out
    assert main(["convert", "to-hf", checkpoint, str(tmp_path / "hf")]) == 0
    assert_loads_in_transformers(tmp_path / "hf", 2048, PRETRAINED_LOGITS)
