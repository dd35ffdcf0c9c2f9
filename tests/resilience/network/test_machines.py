"""Several machines in one run, and spare machines (`train --nnodes`): what the loss of a rank, of a
machine, of its network and of the coordinator does. Losses equal those of a run without faults."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.harness.tolerances import FAULTS_FLOAT64
from tests.resilience.network.machines import (
    BUDDIES,
    STEP_S,
    Machines,
    machines,
    undisturbed_losses,
)
from tests.resilience.network.namespaces import unavailable_reason
from torchtitan_lite.fault_tolerance.supervision.coordinator.timing import (
    LEASE_S,
    LOST_S,
    STOP_S,
    SUSPECT_S,
)

_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    pytest.mark.timeout(600),
]
_STEPS = 120
_BUSY_S = 3.0
"""By how much a busy machine may be late."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run without faults."""
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), _STEPS)


def _check_losses(run: Machines, expected: list[float]) -> None:
    assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("source", ["memory", "storage"])
def test_a_spare_machine_replaces_a_killed_one(
    source: str, expected: list[float], tmp_path: Path
) -> None:
    """Its state comes from the machine that holds the copies of it, else from storage."""
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c", more=BUDDIES if source == "memory" else ())
        survivor, spare = run.rank("a"), run.rank("c")
        run.wait_for_step(12)
        run.kill("b")
        before, records = run.last_step(), run.num_records()
        # Its connections ended with its processes.
        assert run.wait_for_generation(2) < SUSPECT_S
        run.wait(lambda: run.num_records() > records)
        if source == "memory":
            assert not list(run.output.glob("checkpoint/step-*")), "the state is in storage, too"
            # Two steps, and those that were made while the copy was sent.
            assert before - run.newest_record() + 1 <= 4
        run.wait(lambda: run.writers("a") and run.writers("c"))
        assert (survivor, spare) == (run.rank("a"), run.rank("c"))
        _check_losses(run, expected)


@pytest.mark.matrix
def test_a_killed_rank_is_replaced_on_its_machine(expected: list[float], tmp_path: Path) -> None:
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c", more=("--spares=1",))
        # The spares are started after the first step.
        run.wait(lambda: len(run.processes("a")) == 2)
        (writer,) = run.writers("a")
        killed, survivor = writer.ppid(), run.writers("b")[0].ppid()
        (spare,) = run.processes("a") - {killed}
        step = run.last_step()
        os.kill(killed, signal.SIGKILL)
        # No lease has to run out.
        assert run.wait_for_generation(2) < LEASE_S + _BUSY_S
        run.wait_for_step(step + 3)
        assert [one.ppid() for one in run.writers("b")] == [survivor]
        run.wait(lambda: [one.ppid() for one in run.writers("a")] == [spare])
        assert not run.writers("c")
        _check_losses(run, expected)


@pytest.mark.matrix
def test_a_machine_that_is_cut_off_stops_before_others_write_in_its_place(
    expected: list[float], tmp_path: Path
) -> None:
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c")
        rank = run.rank("b")
        assert rank is not None
        began_s = time.monotonic()
        run.network.unplug("b")
        assert run.wait_for_generation(2) < LEASE_S + _BUSY_S
        run.wait(lambda: not run.writers("b"))
        assert not run.resumes()
        assert time.monotonic() - began_s < LEASE_S + STOP_S
        run.wait(run.resumes)
        step = run.last_step()
        run.wait_for_step(step + 3)
        assert run.writers("c") and not run.writers("b")
        # It returns as a spare machine, with its process, and takes the next vacant place.
        run.network.plug("b")
        run.wait(lambda: "generation 2, 3 machines" in run.text("coordinator"))
        assert psutil.pid_exists(rank) and not run.writers("b")
        run.kill("a")
        run.wait_for_generation(3)
        run.wait(lambda: run.writers("b"))
        _check_losses(run, expected)


@pytest.mark.matrix
def test_a_machine_whose_connections_a_firewall_ends_is_replaced_as_if_it_had_died(
    expected: list[float], tmp_path: Path
) -> None:
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c")
        rank = run.rank("b")
        assert rank is not None
        for other in ("coordinator", "a", "c"):
            run.network.reset("b", other)
        # It lives, and trains until its peers or its lease end.
        assert run.wait_for_generation(2) < SUSPECT_S
        assert psutil.pid_exists(rank) and not run.resumes()
        run.wait(run.resumes)
        assert not run.writers("b")
        run.network.mend()
        run.wait(lambda: "generation 2, 3 machines" in run.text("coordinator"))
        _check_losses(run, expected)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "silent_s",
    [pytest.param(LEASE_S / 4, id="shorter"), pytest.param(LOST_S + 4, id="longer than a lease")],
)
def test_a_restarted_coordinator_changes_no_member(
    silent_s: float, expected: list[float], tmp_path: Path
) -> None:
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c")
        ranks = [run.rank(name) for name in "abc"]
        run.stop_coordinator()
        time.sleep(silent_s)
        run.start_coordinator()
        step = run.last_step()
        run.wait_for_step(step + 3)
        assert [run.rank(name) for name in "abc"] == ranks
        assert run.writers("a") and run.writers("b") and not run.writers("c")
        _check_losses(run, expected)


@pytest.mark.matrix
def test_an_outage_of_the_coordinator_replaces_nobody(
    expected: list[float], tmp_path: Path
) -> None:
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c")
        run.stop_coordinator(signal.SIGSTOP)
        time.sleep(2 * LOST_S)
        # All of them have stopped, and all return to their places.
        assert not run.writers("a") and not run.writers("b")
        run.stop_coordinator(signal.SIGCONT)
        run.wait(lambda: run.writers("a") and run.writers("b"))
        assert not run.writers("c")
        _check_losses(run, expected)


@pytest.mark.matrix
def test_an_agent_that_is_blocked_loses_its_place(expected: list[float], tmp_path: Path) -> None:
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        run.train("a", "b", "c")
        run.agents["b"].send_signal(signal.SIGSTOP)
        assert run.wait_for_generation(2) < LEASE_S + _BUSY_S
        assert not run.resumes()
        run.wait(run.resumes)
        assert run.writers("c") and not run.writers("b")
        del run.agents["b"]
        _check_losses(run, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("is_silent", [False, True], ids=["answers", "is silent"])
def test_sigterm_at_one_machine_stops_all(is_silent: bool, tmp_path: Path) -> None:
    with machines(tmp_path, "a", "b", "c", steps=100_000) as run:
        faults = f"slow={STEP_S} late_end={LEASE_S / 4}"
        run.train("a", "b", "c", more=("--checkpoint.interval=100000",), RANK_FAULTS=faults)
        run.agents["b"].send_signal(signal.SIGTERM)
        if is_silent:
            # On a busy machine, the last save may take longer than a lease.
            run.wait(lambda: _is_saved(run, run.last_step()))
            run.stop_coordinator(signal.SIGSTOP)
        for name in "ab":
            assert run.exit_status(name) == 0, run.report()
            silence = "the coordinator does not answer whether" in run.text(name)
            assert silence is is_silent
        if not is_silent:
            assert run.exit_status("c") == 0, run.report()
        saved = run.output / "checkpoint" / f"step-{run.last_step()}"
        assert saved.is_dir()


def _is_saved(run: Machines, step: int) -> bool:
    # Rank 0, which logs the save, is on either machine.
    return any(f"Saved step {step} in" in run.text(name) for name in "ab")
