"""Replicas roll back to a common state, and continue like a single replica."""

import json
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.replicas import replicas
from tests.harness.tolerances import FAULTS_FLOAT64

_ARGUMENTS: tuple[str, ...] = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--metrics.log_freq=1",
    "--training.steps=16",
    # Every state is stored, so that the target of a rollback is known.
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=0",
    "--checkpoint.async_mode=disabled",
    # So close to the noise that some steps of any run exceed it.
    "--anomalies.on_spike=roll_back",
    "--anomalies.spike_window=8",
    "--anomalies.spike_min_steps=8",
    "--anomalies.spike_factor=2",
    "--anomalies.roll_back_steps=2",
    "--anomalies.max_roll_backs=50",
    "--debug.max_skipped_steps=50",
    "--fault_tolerance.process_group_timeout_ms=20000",
    # All replicas first recompute each such step, with the same result.
    "--fault_tolerance.replay_check=true",
)


def _history(folder: Path) -> tuple[list[tuple[int, float, bool]], list[int]]:
    """Return the step, the loss and whether it was skipped for each attempted step, and the
    rollbacks."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [(one["step"], one["loss"], one["skipped"]) for one in lines if "event" not in one]
    assert not [one for one in lines if one.get("event") == "replay_differs"]
    return steps, [one["step"] for one in lines if one.get("event") == "rolled_back"]


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_replicas_roll_back_together_and_continue_like_a_single_one(tmp_path: Path) -> None:
    with replicas(tmp_path / "run", 1, _ARGUMENTS) as run:
        for number in (0, 1):
            run.start(number)
        uninterrupted = tmp_path / "uninterrupted"
        own = [*_ARGUMENTS, f"--job.dump_folder={uninterrupted}"]
        launch.run(1, own, tmp_path / "uninterrupted.log")
        assert [run.wait(number) for number in (0, 1)] == [0, 0], run.text(0) + run.text(1)
        expected, returns = _history(uninterrupted)
        assert returns, "no step of the run spiked: lower spike_factor"
        for number in (0, 1):
            steps, own_returns = _history(run.output(number))
            assert len(own_returns) == len(returns)
            first = expected.index(next(one for one in expected if one[0] == steps[0][0]))
            assert len(steps) == len(expected) - first
            for (step, loss, skipped), other in zip(steps, expected[first:], strict=True):
                assert (step, skipped) == (other[0], other[2])
                assert loss == pytest.approx(other[1], rel=FAULTS_FLOAT64)
