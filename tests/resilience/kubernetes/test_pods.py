"""The script of the pods of deploy/kubernetes, with the environment and the names that JobSet
gives them: lost and deleted pods."""

import signal
from pathlib import Path

import pytest

from tests.harness import launch
from tests.resilience.kubernetes.pods import Pods, pods
from tests.resilience.network.namespaces import unavailable_reason
from tests.resilience.scheduled_run import ARGUMENTS, check_losses, undisturbed_losses

_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an undisturbed run."""
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed") / "run")


def _arguments(folder: Path) -> list[str]:
    return [*ARGUMENTS, f"--job.dump_folder={folder / 'run'}"]


def _finish(run: Pods, expected: list[float]) -> None:
    assert {run.status(pod) for pod in run.names} == {0}, run.report()
    check_losses(run.run, expected)


def test_a_lost_pod_of_a_replica_is_replaced(expected: list[float], tmp_path: Path) -> None:
    with pods(tmp_path / "pods", 2, 2, _arguments(tmp_path / "pods")) as run:
        run.wait_for_step(5, num_replicas=2)
        run.send((1, 1), signal.SIGKILL)
        run.wait(lambda: run.running[1, 1].poll() is not None)
        # The other replica trains alone, until the Job has started another pod.
        run.wait_for_step(6, num_replicas=1)
        run.start((1, 1))
        run.wait_for_step(7, num_replicas=2)
        _finish(run, expected)
        # The coordinator was notified of the departure.
        assert "departures.py" not in run.report()


def test_a_deleted_pod_saves_and_its_replica_heals(expected: list[float], tmp_path: Path) -> None:
    with pods(tmp_path / "pods", 2, 1, _arguments(tmp_path / "pods")) as run:
        run.wait_for_step(5, num_replicas=2)
        run.send((1, 0), signal.SIGTERM)
        # Not 0, which would complete the replica, nor the status of the failure policy.
        assert run.status((1, 0)) == 143, run.report()
        run.start((1, 0))
        joined = launch.steps_of(run.run / "replica_000")[-1]["step"]
        run.wait_for_step(joined + 2, num_replicas=2)
        _finish(run, expected)
