"""A run has one history: what replicas may continue after all have ended, or after a partition."""

import time
from pathlib import Path

import pytest

from tests.chaos.comparison import newest_checkpoint_step
from tests.harness.replicas import ENDLESS, Replicas, check_against_undisturbed_run, replicas
from tests.resilience.network.namespaces import unavailable_reason

_ARGUMENTS = (*ENDLESS, "--checkpoint.interval=100000", "--training.global_batch_size=4")
_WAITS = "This quorum does not train yet"
_REASON = unavailable_reason()


def _wait_for_text(run: Replicas, number: int, text: str, timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while text not in run.text(number):
        assert run.running[number].poll() is None, run.text(number)
        assert time.monotonic() < deadline_s, run.text(number)
        time.sleep(0.05)


@pytest.mark.matrix
def test_the_newest_snapshot_wins_if_the_older_one_returns_first(tmp_path: Path) -> None:
    with replicas(tmp_path / "run", 1, _ARGUMENTS) as run:
        # Replica 0 has a snapshot of each step, replica 1 of every 200th.
        run.start(0, "--checkpoint.ram_interval=1")
        run.start(1, "--checkpoint.ram_interval=200")
        for number in (0, 1):
            run.wait_for_step(number, 5)
        for number in (0, 1):
            run.suspend(number)
        for number in (0, 1):
            run.kill(number)
        before = {number: run.losses(number) for number in (0, 1)}
        newest = max(max(losses) for losses in before.values())
        run.start(1, "--checkpoint.ram_interval=200")
        _wait_for_text(run, 1, f"{_WAITS}: replica_00000")
        time.sleep(5)
        run.start(0, "--checkpoint.ram_interval=1")
        run.wait_for_step(1, newest + 10)
        run.stop()
        for number in (0, 1):
            assert run.wait(number) == 0, run.text(number)
        for number in (0, 1):
            repeated = [step["step"] for step in run.steps(number)]
            # The step in flight at the kill may be committed by one replica only.
            assert len(repeated) <= len(set(repeated)) + 1, sorted(repeated)
        check_against_undisturbed_run(run, 1, _ARGUMENTS, tmp_path)


@pytest.mark.matrix
def test_a_replica_that_does_not_return_is_waited_for_once(tmp_path: Path) -> None:
    arguments = (*_ARGUMENTS, "--fault_tolerance.join_timeout_s=10")
    with replicas(tmp_path / "run", 1, arguments) as run:
        for number in (0, 1):
            run.start(number)
        for number in (0, 1):
            run.wait_for_step(number, 5)
        for number in (0, 1):
            run.kill(number)
        newest = max(max(run.losses(number)) for number in (0, 1))
        run.start(0)
        _wait_for_text(run, 0, f"{_WAITS}: replica_00001 may have a newer state")
        run.wait_for_step(0, newest + 5)
        # It returns too late: its snapshots do not count any more.
        run.start(1)
        run.wait_for_step(1, max(run.losses(0)) + 5)
        assert "Its own steps since then" in run.text(1)
        run.stop()
        for number in (0, 1):
            assert run.wait(number) == 0, run.text(number)
        check_against_undisturbed_run(run, 1, arguments, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_two_lighthouses_do_not_make_two_histories(tmp_path: Path) -> None:
    from tests.resilience.network.hosts import lighthouse, network_replicas, replica

    with network_replicas(tmp_path / "run", 2, num_lighthouses=2) as run:
        run.network.cut(replica(0), replica(1))
        run.network.cut(replica(0), lighthouse(1))
        run.network.cut(replica(1), lighthouse(0))
        for number in (0, 1):
            run.start(number)
        deadline_s = time.monotonic() + 120
        while max(max(run.losses(number), default=0) for number in (0, 1)) < 120:
            assert time.monotonic() < deadline_s, run.report()
            time.sleep(0.1)
        time.sleep(5)
        steps = [set(run.losses(number)) for number in (0, 1)]
        assert not (steps[0] and steps[1]), f"both sides train:\n{run.report()}"
        waiting = 0 if steps[1] else 1
        assert "all replicas need the same lighthouse" in run.text(waiting)
        # The one that waits gets the other's lighthouse, and the network is whole again.
        run.network.mend()
        run.kill(waiting)
        run.lighthouse_of[waiting] = 1 - waiting
        run.start(waiting)
        run.wait_for_step(waiting, max(run.losses(1 - waiting)) + 5)
        run.check_against_undisturbed_run(tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_a_suspended_side_that_was_taken_over_does_not_continue(tmp_path: Path) -> None:
    from tests.resilience.network.hosts import network_replicas

    more = ("--fault_tolerance.join_timeout_s=1", "--checkpoint.interval=20")
    with network_replicas(tmp_path / "run", 2, num_lighthouses=2) as run:
        run.start(0, *more)
        run.wait_for_step(0, 45)
        run.suspend(0)
        suspended = run.running.pop(0)
        before = max(run.losses(0))
        run.start(1, *more)
        _wait_for_text(run, 1, _WAITS)
        run.wait_for_step(1, before + 60)
        # All of its processes continue; its next commit finds that it was taken over.
        run.resume(suspended.pid)
        assert suspended.wait(60) != 0
        assert "Its own steps since then" in run.text(0)
        own = [step["step"] for step in run.steps(0)]
        assert max(own) <= before + 1, "the suspended side committed steps"
        run.lighthouse_of[0] = 1
        run.start(0, *more)
        run.wait_for_step(0, max(run.losses(1)) + 5)
        run.check_against_undisturbed_run(tmp_path)
        assert newest_checkpoint_step(run.folder) > before
