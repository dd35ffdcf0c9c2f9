"""Two replicas on one GPU: one is killed, restarted and healed, and the losses do not change."""

from pathlib import Path

import pytest

from tests.replicas import ENDLESS, check_against_undisturbed_run, replicas

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

OFFLOAD = "--training.enable_cpu_offload=true"


@pytest.mark.parametrize("more", [[], [OFFLOAD]], ids=["", "offload"])
def test_a_killed_and_healed_replica_does_not_change_the_losses(
    more: list[str], device: str, tmp_path: Path
) -> None:
    arguments = [
        *ENDLESS,
        f"--job.device={device}",
        "--training.seq_len=128",
        # FlexAttention has no float64.
        "--model.attention_mask=causal",
        "--training.global_batch_size=6",
        "--checkpoint.interval=10",
        *more,
    ]
    with replicas(tmp_path / "run", 1, arguments) as run:
        file = tmp_path / "halt"
        run.start(0)
        run.start(1, faults=f"blocked_by={file}")
        run.wait_for_step(0, 4)
        run.wait_for_step(1, 4)
        # Killed between two steps, it would cost the other replica nothing.
        run.block(1, file)
        run.kill(1)
        run.wait_for_step(0, run.steps(0)[-1]["step"] + 3)
        assert run.steps(0)[-1]["num_replicas"] == 1
        run.start(1)
        returned = run.steps(0)[-1]["step"]
        while run.steps(0)[-1]["num_replicas"] == 1:
            run.wait_for_step(0, run.steps(0)[-1]["step"] + 1)
        run.wait_for_step(1, max(returned, run.steps(0)[-1]["step"]) + 3)
        run.stop()
        assert [run.wait(number) for number in run.running] == [0, 0]
        assert "healed" in run.events(1)
        check_against_undisturbed_run(run, 1, arguments, tmp_path)
