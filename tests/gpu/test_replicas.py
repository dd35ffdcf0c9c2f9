"""Two replicas on one GPU: one is killed, restarted and healed, and the losses do not change."""

from pathlib import Path

import pytest

from tests.harness.replicas import (
    ENDLESS,
    check_against_undisturbed_run,
    kill_and_restart,
    replicas,
)

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
        kill_and_restart(run, tmp_path / "halt")
        assert "healed" in run.events(1)
        check_against_undisturbed_run(run, 1, arguments, tmp_path)
