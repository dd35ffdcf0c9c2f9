"""Another failure while a replica heals: it trains from a complete state or not at all."""

import signal
import time
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.replicas import ENDLESS, check_against_undisturbed_run, replicas
from torchtitan_lite.core.outputs import RECEIVES_STATE


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_a_rank_that_cannot_heal_prevents_its_neighbor_from_training(tmp_path: Path) -> None:
    """Silent corruption with torchft alone: the two ranks would commit different steps."""
    with replicas(tmp_path / "run", 2, ENDLESS) as run:
        run.start(0)
        run.wait_for_step(0, 3)
        run.start(1, faults="heal_interrupted=1")
        run.wait_for_step(1, 1)
        run.wait_for_step(1, run.steps(1)[0]["step"] + 3)
        run.stop()
        assert [run.wait(number) for number in run.running] == [0, 0]
        assert run.events(0).count("step_failed") >= 1
        happened = [one for one in run.events(1) if one in {"healed", "step_failed"}]
        # The leader received the state before, and receives it again.
        assert happened[:3] == ["healed", "step_failed", "healed"]
        assert "the network is gone" in run.log(1).read_text()
        check_against_undisturbed_run(run, 2, ENDLESS, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_the_only_donor_dies_during_healing(tmp_path: Path) -> None:
    with replicas(tmp_path / "run", 1, ENDLESS) as run:
        run.start(0, faults="donor_killed")
        run.wait_for_step(0, 7)
        run.start(1)
        assert run.wait(0) == -signal.SIGKILL
        assert run.wait(1) == 1
        assert RECEIVES_STATE in run.log(1).read_text()
        assert run.steps(1) == []
        last = run.steps(0)[-1]["step"]
        run.start(1)
        run.wait_for_step(1, last + 3)
        run.stop()
        assert run.wait(1) == 0
        first = run.steps(1)[0]["step"]
        assert 6 <= first <= last + 2
        assert f"at step {first - 1}" in run.log(1).read_text()
        check_against_undisturbed_run(run, 1, ENDLESS, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_another_donor_replaces_one_that_dies_during_healing(tmp_path: Path) -> None:
    with replicas(tmp_path / "run", 1, ENDLESS) as run:
        run.start(1)
        run.wait_for_step(1, 2)
        # First in the order of names, and therefore the first donor.
        run.start(0, faults="donor_killed")
        run.wait_for_step(0, 1)
        run.start(2)
        assert run.wait(0) == -signal.SIGKILL
        run.wait_for_step(2, 1)
        run.wait_for_step(2, run.steps(2)[0]["step"] + 3)
        run.stop()
        assert [run.wait(number) for number in (1, 2)] == [0, 0]
        assert run.log(2).read_text().count(RECEIVES_STATE) >= 2
        check_against_undisturbed_run(run, 1, ENDLESS, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("differs", "num_ranks"),
    [(["--training.dtype=float32"], 1), (["--optimizer.lr=1e-5"], 1), ([], 2)],
    ids=["dtype", "lr", "ranks"],
)
def test_a_replica_with_other_settings_exits_alone(
    tmp_path: Path, differs: list[str], num_ranks: int
) -> None:
    with replicas(tmp_path / "run", 1, ENDLESS) as run:
        run.start(0)
        run.wait_for_step(0, 2)
        run.start(1, *differs, num_ranks=num_ranks)
        assert run.wait(1) == 1
        text = run.log(1).read_text()
        assert "same config and the same number of ranks" in text
        # torchrun prints its own error.
        assert num_ranks == 2 or "Traceback" not in text
        assert run.steps(1) == []
        before = run.steps(0)[-1]["step"]
        run.wait_for_step(0, before + 5)
        run.stop()
        assert run.wait(0) == 0
        check_against_undisturbed_run(run, 1, ENDLESS, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_replica_that_fell_behind_during_startup_does_not_train(tmp_path: Path) -> None:
    """A checkpoint stored in the meantime sets the progress floor."""
    with replicas(tmp_path / "run", 1, ENDLESS) as run:
        run.start(1, faults=f"delayed_join={run.folder / 'join_1'}")
        run.wait_until_ready(1)
        run.start(0)
        run.wait_for_step(0, 6)
        run.running[0].terminate()
        assert run.wait(0) == 0
        stored = run.steps(0)[-1]["step"]
        run.release(1)
        assert run.wait(1) == 1
        assert f"Step {stored} of this run is in storage" in run.log(1).read_text()
        assert run.steps(1) == []
        run.start(1)
        run.wait_for_step(1, stored + 2)
        run.stop()
        assert run.wait(1) == 0
        assert run.steps(1)[0]["step"] == stored + 1


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_state_before_the_first_step_is_received(tmp_path: Path) -> None:
    """All steps from the first one are skipped, so that the optimizer has no state to send."""
    arguments = [*ENDLESS, "--debug.max_skipped_steps=100000"]
    with replicas(tmp_path / "run", 1, arguments) as run:
        file = tmp_path / "data_is_good"
        for number in (0, 1):
            run.start(number, faults=f"nan_until={file} slow=0.05")
            if number == 0:
                _wait_for_tries(run.output(0), 4)
        _wait_for_tries(run.output(1), 2)
        file.touch()
        run.wait_for_step(0, 4)
        run.wait_for_step(1, 4)
        run.stop()
        assert [run.wait(number) for number in run.running] == [0, 0]
        assert "healed" in run.events(1)
        common = run.losses(0).keys() & run.losses(1).keys()
        assert {1, 2, 3} <= common
        assert all(run.losses(0)[step] == run.losses(1)[step] for step in common)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_skipped_step_during_which_a_replica_dies(tmp_path: Path) -> None:
    """The step is retried without the dead replica, and skipped again."""
    arguments = [*ENDLESS, "--training.global_batch_size=4"]
    with replicas(tmp_path / "run", 1, arguments) as run:
        nan = "nan=32-40"
        run.start_together({0: nan, 1: f"{nan} killed_at=36"})
        assert run.wait(1) == -signal.SIGKILL
        run.wait_for_step(0, 12)
        run.start(1, faults=nan)
        while "healed" not in run.events(1):
            run.wait_for_step(0, run.steps(0)[-1]["step"] + 1)
        run.wait_for_step(1, run.steps(0)[-1]["step"] + 3)
        run.stop()
        assert [run.wait(number) for number in run.running] == [0, 0]
        assert run.events(0).count("refused") == 3
        check_against_undisturbed_run(run, 1, arguments, tmp_path, faults=nan)


def _wait_for_tries(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(launch.steps_of(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
