"""Few file descriptors: a low limit for all processes, and none left in the launcher or agent when
a process must be replaced."""

import resource
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.harness import launch
from tests.resilience.spared_run import SparedRun
from tests.resilience.test_launch import killed_at_exit, output_of, rank_of, start

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(200)]
_PROBLEM = "No process can be started: [Errno 24] Too many open files"


def _num_replicas(folder: Path) -> int:
    steps = launch.steps_of(folder / "replica_000")
    return steps[-1]["num_replicas"] if steps else 0


def _use_up_descriptors(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Let a process open nothing more, and return its limits."""
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    number = psutil.Process(process.pid).num_fds()
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (number, limits[1]))
    return limits


def test_four_replicas_need_fewer_than_256(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    arguments = ("--training.steps=100", "--training.global_batch_size=8")
    process = start(folder, log, *arguments, replicas=4, own=["--spares=1"])
    # Inherited by all processes of the run.
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (256, 256))
    with killed_at_exit(process, folder):
        launch.wait_until(lambda: _num_replicas(folder) == 4, 120)
        rank_of(folder, 1).kill()
        text = output_of(process, log)
    assert "Too many open files" not in text


def test_a_launcher_without_descriptors_restarts_a_replica_later(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start(folder, log, "--training.steps=100000")
    with killed_at_exit(process, folder):
        launch.wait_until(lambda: _num_replicas(folder) == 2, 120)
        limits = _use_up_descriptors(process)
        rank_of(folder, 1).kill()
        launch.wait_until(lambda: _PROBLEM in log.read_text(), 20)
        step = launch.steps_of(folder / "replica_000")[-1]["step"]
        launch.wait_for_step(folder / "replica_000", step + 10, process, log)
        assert _num_replicas(folder) == 1
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        launch.wait_until(lambda: _num_replicas(folder) == 2, 60)
        process.terminate()
        assert output_of(process, log).count(_PROBLEM) == 1


def test_an_agent_without_descriptors_starts_a_spare_later(
    runs: list[SparedRun], tmp_path: Path
) -> None:
    run = SparedRun(tmp_path / "run", 2, 1, "--training.steps=100000", slow="0.05")
    runs.append(run)
    run.wait_for_step(3)
    run.wait_for_spares(3)
    limits = _use_up_descriptors(run.process)
    run.kill_rank(1)
    launch.wait_until(lambda: _PROBLEM in run.log.read_text(), 20)
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, limits)
    run.wait_for_spares(3)
    run.kill_rank(0)
