"""The coordinator of several machines is killed and started again, also while a machine or a rank
is lost: no other one loses its place, and losses equal those of a run without faults."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.tolerances import FAULTS_FLOAT64
from tests.resilience.network.machines import Machines, machines, undisturbed_losses
from tests.resilience.network.namespaces import unavailable_reason
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import LEASE_S, LOST_S

_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    pytest.mark.timeout(600),
    pytest.mark.matrix,
]
_STEPS = 60
_OUTAGES = pytest.mark.parametrize(
    "silent_s", [LEASE_S / 4, LOST_S + 4], ids=["shorter", "longer than a lease"]
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run without faults."""
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), _STEPS)


def _restart_coordinator(run: Machines, silent_s: float) -> None:
    run.stop_coordinator()
    time.sleep(silent_s)
    run.start_coordinator()


@_OUTAGES
def test_a_machine_is_lost_with_the_coordinator(
    silent_s: float, expected: list[float], tmp_path: Path
) -> None:
    """The machine dies while no coordinator runs: the spare one takes its place, and no other."""
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c")
        survivor, spare = run.rank("a"), run.rank("c")
        run.wait_for_step(12)
        run.stop_coordinator()
        run.kill("b")
        time.sleep(silent_s)
        run.start_coordinator()
        began_s = time.monotonic()
        run.wait(lambda: run.writers("a") and run.writers("c"))
        print(f"both train after {time.monotonic() - began_s:.1f} s")
        assert (survivor, spare) == (run.rank("a"), run.rank("c"))
        assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)


@_OUTAGES
def test_a_rank_is_lost_with_the_coordinator(
    silent_s: float, expected: list[float], tmp_path: Path
) -> None:
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c")
        survivor, killed = run.rank("a"), run.rank("b")
        assert killed is not None
        run.wait_for_step(12)
        run.stop_coordinator()
        os.kill(killed, signal.SIGKILL)
        time.sleep(silent_s)
        run.start_coordinator()
        step = run.last_step()
        run.wait_for_step(step + 5)
        assert survivor == run.rank("a") and run.rank("b") not in (None, killed)
        assert not run.writers("c")
        assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)


@_OUTAGES
@pytest.mark.parametrize("is_killed", [False, True], ids=["coordinator", "and a machine"])
def test_replicas_survive_their_lighthouse(
    silent_s: float, is_killed: bool, tmp_path: Path
) -> None:
    """The coordinator is the lighthouse of the replicas."""
    expected = undisturbed_losses(tmp_path / "undisturbed", _STEPS)
    with machines(tmp_path, *"abc", steps=_STEPS, num_replicas=2) as run:
        run.train(*"abc", RANK_FAULTS="slow=1.0")
        run.wait(lambda: launch.steps_of(run.output)[-1]["num_replicas"] == 2)
        survivor = run.rank("a")
        run.stop_coordinator()
        if is_killed:
            run.kill("b")
        time.sleep(silent_s)
        run.start_coordinator()
        restarted_at = time.time()
        print("step when restarted", run.last_step())
        run.wait(lambda: _trains_together(run, restarted_at))
        print(f"together after {time.time() - restarted_at:.1f} s, step {run.last_step()}")
        assert run.rank("a") == survivor
        assert bool(run.writers("c")) is is_killed
        assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)


def _trains_together(run: Machines, since: float) -> bool:
    last = launch.steps_of(run.output)[-1]
    return last["time"] > since and last["num_replicas"] == 2
