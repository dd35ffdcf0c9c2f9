"""How replicas leave: at the end of the run, on SIGTERM, and when too few are left."""

from pathlib import Path

import pytest

from tests.harness.replicas import ENDLESS, Replicas, replicas
from torchtitan_lite.checkpoint.storage.base import open_storage
from torchtitan_lite.checkpoint.verification import verify

_ARGUMENTS = (*ENDLESS, "--checkpoint.interval=1000000")
_OVER = "All 12 steps of this run are done."


def _stored(run: Replicas) -> list[int]:
    """Return the committed checkpoint steps, after checking that all are complete."""
    storage = open_storage(str(run.folder / "checkpoint"))
    steps = sorted(storage.steps())
    assert [verify(storage, f"step-{step}") for step in steps] == [[]] * len(steps)
    names = {entry.name for entry in (run.folder / "checkpoint").iterdir()}
    # A killed replica leaves its lease.
    actual = {name for name in names if not name.endswith("lease.json")} - {"assets"}
    assert actual == {f"step-{step}" for step in steps}
    return steps


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("weights", [True, False])
def test_a_replica_that_returns_after_the_end_of_the_run_reports_it(
    tmp_path: Path, weights: bool
) -> None:
    last = f"--checkpoint.last_save_model_only={str(weights).lower()}"
    arguments = [*_ARGUMENTS, "--training.steps=12", last]
    with replicas(tmp_path / "run", 1, arguments) as run:
        # One replica dies in the last step, and the other repeats it.
        run.start_together({0: "", 1: "killed_at=44"})
        assert [run.wait(number) for number in (0, 1)] == [0, -9], run.text(0) + run.text(1)
        assert run.steps(0)[-1]["step"] == 12
        assert "step_failed" in run.events(0)
        assert _stored(run)[-1] == 12
        manifest = run.folder / "checkpoint" / "step-12" / "manifest.json"
        written = manifest.stat().st_ino
        for number in (1, 0):
            run.start(number)
            assert run.wait(number) == 0
            assert _OVER in run.log(number).read_text()
        assert run.steps(1)[-1]["step"] == 11
        assert manifest.stat().st_ino == written


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_waiting_for_too_few_replicas_ends_with_a_save_on_sigterm(tmp_path: Path) -> None:
    arguments = [*_ARGUMENTS, "--fault_tolerance.min_replica_size=2"]
    with replicas(tmp_path / "run", 1, arguments) as run:
        run.start(0)
        run.start(1)
        run.wait_for_step(0, 3)
        run.wait_for_step(1, 3)
        run.kill(1)
        while "Quorum of 1 replicas, 2 are required" not in run.log(0).read_text():
            assert run.running[0].poll() is None
        alone_at = run.steps(0)[-1]["step"]
        run.start(1)
        run.wait_for_step(0, alone_at + 3)
        assert {step["num_replicas"] for step in run.steps(0)} == {2}
        run.kill(1)
        run.running[0].terminate()
        assert run.wait(0) == 0, run.text(0)
        assert _stored(run)[-1] == run.steps(0)[-1]["step"]


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_all_replicas_leave_on_sigterm(tmp_path: Path, mode: str) -> None:
    arguments = [*_ARGUMENTS, f"--checkpoint.async_mode={mode}"]
    with replicas(tmp_path / "run", 2, arguments) as run:
        run.start(0)
        run.start(1)
        run.wait_for_step(0, 3)
        run.wait_for_step(1, 3)
        run.stop()
        assert [run.wait(number) for number in (0, 1)] == [0, 0], run.text(0) + run.text(1)
        last = {run.steps(number)[-1]["step"] for number in (0, 1)}
        # One replica may take another step alone after the other has left.
        assert set(_stored(run)) >= last
        # Each replica saves because the other might continue; the later one replaces the save.
        for number in (0, 1):
            step = run.steps(number)[-1]["step"]
            assert run.log(number).read_text().count(f"Saved step {step} ") == 1


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_a_replica_dies_during_a_save(tmp_path: Path, mode: str) -> None:
    arguments = [*_ARGUMENTS, f"--checkpoint.async_mode={mode}", "--checkpoint.interval=10"]
    arguments += ["--training.steps=40", "--checkpoint.keep_latest_k=0"]
    with replicas(tmp_path / "run", 1, arguments) as run:
        run.start_together({0: "slow=0.05", 1: "slow=0.05 killed_in_save=20"})
        assert run.wait(1) == -9
        assert run.wait(0) == 0, run.text(0)
        stored = _stored(run)
        assert stored[-1] == 40 and set(stored) >= {10, 30, 40}, run.text(0)
        together = {step["step"] for step in run.steps(0) if step["num_replicas"] == 2}
        assert 20 in together and 22 not in together
        # The interrupted save is repeated by the remaining replicas.
        assert 20 in stored or 21 in stored
        text = run.log(0).read_text()
        assert text.count("Saved step 40") == 1 and text.count("Saved step 30") == 1
