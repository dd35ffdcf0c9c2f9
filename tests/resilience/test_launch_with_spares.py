"""The launcher with spares: a rank that dies or hangs is replaced within its replica, whose other
ranks keep their processes, while the other replicas continue."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests import launch
from tests.resilience.test_launch import (
    EXACT,
    REPLICAS,
    killed_at_exit,
    losses,
    output_of,
    rank_of,
    start,
)
from tests.tolerances import FAULTS_FLOAT64
from torchtitan_lite.report import check_samples

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")

_STEPS = 250
"""Enough that a replaced rank trains again before the other replica has finished."""
_SETTINGS = (
    *EXACT,
    # So low that differences in rounding do not grow over the steps.
    "--optimizer.lr=1e-4",
    f"--training.steps={_STEPS}",
    "--checkpoint.enable=true",
    "--checkpoint.interval=100000",
    "--checkpoint.ram_interval=1",
    "--debug.sample_ledger=true",
)


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of an undisturbed run, by step."""
    folder = tmp_path_factory.mktemp("undisturbed_losses")
    own = [*_SETTINGS, "--checkpoint.enable=false", "--metrics.log_freq=1"]
    own.append(f"--job.dump_folder={folder / 'run'}")
    launch.run(1, [*launch.SMALL, *own], folder / "log")
    return losses(folder / "run")


@contextmanager
def spared_run(
    folder: Path, log: Path, *more: str, replicas: int, ranks: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Launch replicas with a spare each, and wait until all have trained."""
    arguments = [*_SETTINGS, *more]
    process = start(
        folder, log, *arguments, replicas=replicas, ranks=str(ranks), own=["--spares=1"]
    )
    with killed_at_exit(process, folder):
        for name in REPLICAS[:replicas]:
            launch.wait_for_step(folder / name, 3, process, log)
        yield process


def wait_for_spare(rank: psutil.Process, ranks: int) -> None:
    """Block until the agent of this rank has a spare that has imported everything."""
    agent = rank.parent()
    assert agent is not None
    launch.wait_until(lambda: len(agent.children()) == ranks + 1, 60)
    newest = max(agent.children(), key=lambda one: one.create_time())
    # A spare starts no thread until it has imported everything.
    launch.wait_until(lambda: newest.num_threads() > 1, 60)


def num_starts_together(folder: Path) -> int:
    """Return how often this replica has begun to train with the other one."""
    events = launch.events_of(folder)
    return sum(one["event"] == "quorum" and one["replicas"] == 2 for one in events)


def check_run(folder: Path, expected: dict[int, float]) -> None:
    """Check the losses of all replicas, and that each sample was used once and in order."""
    assert losses(folder) == pytest.approx(expected, rel=FAULTS_FLOAT64)
    checked = check_samples(folder)
    assert checked.problems == [], checked.summary()
    assert checked.samples == {
        step: list(range(4 * (step - 1), 4 * step)) for step in range(1, _STEPS + 1)
    }


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.matrix)])
@pytest.mark.timeout(280)
def test_a_dead_rank_is_replaced_within_its_replica(
    tmp_path: Path, undisturbed_losses: dict[int, float], rank: int
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with spared_run(folder, log, replicas=2, ranks=2) as process:
        victim = rank_of(folder, 1, rank)
        others = [rank_of(folder, 0, 0), rank_of(folder, 0, 1), rank_of(folder, 1, 1 - rank)]
        wait_for_spare(victim, 2)
        before = num_starts_together(folder / REPLICAS[1])
        victim.send_signal(signal.SIGKILL)
        launch.wait_until(lambda: "it is replaced" in log.read_text(), 20)
        launch.wait_until(lambda: num_starts_together(folder / REPLICAS[1]) > before, 60)
        assert [
            rank_of(folder, 0, 0),
            rank_of(folder, 0, 1),
            rank_of(folder, 1, 1 - rank),
        ] == others
        text = output_of(process, log)
    how = r"(killed by SIGKILL|died)"
    assert re.search(rf"replica 1: rank {rank} {how}: it is replaced", text), text
    assert "restarts in" not in text
    assert len(list(folder.glob("launch_logs/*/attempt_*"))) == 2
    aborted = [
        one for one in launch.events_of(folder / REPLICAS[0]) if one["event"] == "step_failed"
    ]
    assert len(aborted) <= 1
    check_run(folder, undisturbed_losses)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_a_replica_of_one_rank_is_replaced_by_its_spare(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with spared_run(folder, log, replicas=2, ranks=1) as process:
        for replica in (1, 0):
            victim = rank_of(folder, replica)
            wait_for_spare(victim, 1)
            own = folder / REPLICAS[replica]
            before = num_starts_together(own)
            victim.send_signal(signal.SIGKILL)
            launch.wait_until(lambda own=own, before=before: num_starts_together(own) > before, 60)
        text = output_of(process, log)
    assert text.count("it is replaced") == 2 and "restarts in" not in text
    check_run(folder, undisturbed_losses)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_a_stopped_rank_is_named_and_replaced_within_its_replica(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    more = ["--fault_tolerance.hang_timeout_s=6"]
    with spared_run(folder, log, *more, replicas=1, ranks=2) as process:
        survivor = rank_of(folder, 0, 0)
        rank_of(folder, 0, 1).send_signal(signal.SIGSTOP)
        launch.wait_until(lambda: "it is replaced" in log.read_text(), 60)
        assert rank_of(folder, 0, 0) == survivor
        text = output_of(process, log)
    assert "rank 1: no progress for" in text and "(stopped)" in text
    assert "restarts in" not in text
    check_run(folder, undisturbed_losses)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_a_dead_agent_costs_its_replica(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with spared_run(folder, log, replicas=1, ranks=2) as process:
        agent = rank_of(folder, 0, 0).parent()
        assert agent is not None
        agent.send_signal(signal.SIGKILL)
        text = output_of(process, log)
    assert "replica 0: failed, agent: killed by SIGKILL" in text
    assert "replica 0: restarts in" in text
    check_run(folder, undisturbed_losses)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_a_rank_that_others_ask_to_stop_restarts_its_replica(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with spared_run(folder, log, replicas=1, ranks=2) as process:
        rank_of(folder, 0, 1).send_signal(signal.SIGTERM)
        text = output_of(process, log)
    assert "replica 0: saved and left, because a process other than the launcher" in text
    assert "replica 0: restarts in" in text
    check_run(folder, undisturbed_losses)
