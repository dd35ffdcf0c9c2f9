"""Faulty ranks, with a wrong data position or wrong numbers, and diverging runs."""

import re
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.replicas import ENDLESS, check_against_undisturbed_run, replicas
from tests.resilience.test_launch import REPLICAS, killed_at_exit, start
from torchtitan_lite.core.errors import DIVERGED, MACHINE_FAULT


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_single_replica_with_ranks_at_different_positions_commits_nothing(tmp_path: Path) -> None:
    with replicas(tmp_path / "run", 2, ENDLESS) as run:
        run.start(0, faults="wrong_cursor=1:40")
        assert run.wait(0) == 1
        assert run.steps(0)[-1]["step"] == 10
        assert "step_failed" in run.events(0)
        run.start(0)
        run.wait_for_step(0, 14)
        run.stop()
        assert run.wait(0) == 0
        assert "at step 10" in run.log(0).read_text()
        check_against_undisturbed_run(run, 2, ENDLESS, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_replica_that_computes_wrong_numbers_leaves_and_the_others_repeat_the_step(
    tmp_path: Path,
) -> None:
    arguments = [*ENDLESS, "--fault_tolerance.replay_check=true"]
    with replicas(tmp_path / "run", 1, arguments) as run:
        run.start_together({0: "", 1: "nan_once=40"})
        assert run.wait(1) == MACHINE_FAULT, run.text(1)
        run.wait_for_step(0, 15)
        run.stop()
        assert run.wait(0) == 0
        text = run.log(1).read_text()
        assert "Step 11 was anomalous" in text and "rank 0 of participant 1" in text
        assert run.steps(1)[-1]["step"] == 10
        assert {"replay_differs", "quorum"} <= set(run.events(0))
        assert "refused" not in run.events(0)
        check_against_undisturbed_run(run, 1, ENDLESS, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_diverged_run_has_its_own_exit_status(tmp_path: Path) -> None:
    """The launcher does not restart it."""
    bad = ["--anomalies.on_non_finite=stop", "--checkpoint.enable=true"]
    own = [f"--job.dump_folder={tmp_path / 'one'}", *bad]
    faults = {"program": launch.FAULTY_PROGRAM, "FAULTS": "nan=20"}
    launch.run(1, [*ENDLESS, *own], tmp_path / "one.log", status=DIVERGED, **faults)
    folder, log = tmp_path / "run", tmp_path / "log"
    # So large a step that the next one is not finite.
    process = start(folder, log, *bad, "--optimizer.lr=1e30", "--lr_scheduler.warmup_steps=0")
    with killed_at_exit(process, folder):
        assert process.wait(timeout=120) == 1
        text = log.read_text()
    assert "the training has diverged" in text and "restarts in" not in text, text
    assert re.search(r"is given up: .* rank 0: exit status 3", text)
    generations = [path for name in REPLICAS for path in (folder / "launch_logs" / name).iterdir()]
    assert len(generations) == 2
