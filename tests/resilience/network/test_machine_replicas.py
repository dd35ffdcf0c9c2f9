"""Several replicas on several machines, with spare machines (`train --nnodes --replicas`)."""

import signal
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.tolerances import FAULTS_FLOAT64
from tests.resilience.network.machines import machines, undisturbed_losses
from tests.resilience.network.namespaces import unavailable_reason

_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    pytest.mark.timeout(600),
]
_STEPS = 60
_STEP_S = 1.0
_FOUR_RANKS = ("--training.local_batch_size=1", "--training.global_batch_size=4")
_TWO_REPLICAS = pytest.mark.parametrize(
    ("names", "num_training"), [("abc", 2), ("abcde", 4)], ids=["one machine each", "two each"]
)
"""Machines, the last one a spare."""


@pytest.mark.matrix
@_TWO_REPLICAS
def test_a_spare_machine_completes_the_replica_of_a_killed_one(
    names: str, num_training: int, tmp_path: Path
) -> None:
    expected = undisturbed_losses(tmp_path / "undisturbed", _STEPS)
    killed, spare = names[num_training - 1], names[-1]
    with machines(tmp_path, *names, steps=_STEPS, num_training=num_training, num_replicas=2) as run:
        # The replicas start one after the other, and the others do not wait.
        run.train(*names, RANK_FAULTS=f"slow={_STEP_S}")
        survivor = run.rank("a")
        run.wait_for_step(12)
        run.kill(killed)
        step = run.last_step()
        # The other replica trains on, alone.
        run.wait_for_step(step + 5)
        assert launch.steps_of(run.output)[-1]["num_replicas"] == 1
        assert not run.writers(spare)
        run.wait(lambda: launch.steps_of(run.output)[-1]["num_replicas"] == 2)
        run.wait(lambda: run.writers(spare))
        assert run.rank("a") == survivor
        assert "generation 2" not in "".join(
            line for line in run.text("coordinator").splitlines(True) if "replica 0:" in line
        )
        assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)


@pytest.mark.matrix
@_TWO_REPLICAS
def test_a_spare_machine_takes_the_place_of_one_that_gets_sigterm(
    names: str, num_training: int, tmp_path: Path
) -> None:
    expected = undisturbed_losses(tmp_path / "undisturbed", _STEPS)
    stopped, spare = names[num_training - 1], names[-1]
    with machines(tmp_path, *names, steps=_STEPS, num_training=num_training, num_replicas=2) as run:
        run.train(*names, RANK_FAULTS=f"slow={_STEP_S}")
        survivor = run.rank("a")
        run.wait_for_step(12)
        agent = run.agents.pop(stopped)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(120) == 0, run.report()
        assert "a stop was requested" in run.text("coordinator")
        run.wait(lambda: launch.steps_of(run.output)[-1]["num_replicas"] == 2)
        run.wait(lambda: run.writers(spare))
        assert run.rank("a") == survivor
        assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)


@pytest.mark.matrix
def test_replicas_on_several_machines_resize_together(tmp_path: Path) -> None:
    expected = undisturbed_losses(tmp_path / "undisturbed", _STEPS, *_FOUR_RANKS)
    with machines(tmp_path, *"abc", steps=_STEPS, num_training=2, num_replicas=2) as run:
        run.train(*"abc", more=_FOUR_RANKS, RANK_FAULTS=f"slow={_STEP_S}")
        run.wait(lambda: launch.steps_of(run.output)[-1]["num_replicas"] == 2)
        for num_ranks, arguments in ((2, ("--parallelism.tensor_parallel_degree=2",)), (1, ())):
            before = {name: run.processes(name) for name in "ab"}
            step = run.last_step()
            outcome = launch.resize(run.dump_folder, num_ranks, *arguments)
            assert outcome.returncode == 0, (outcome.stderr, run.report())
            run.wait_for_step(step + 3)
            run.wait(lambda: launch.steps_of(run.output)[-1]["num_replicas"] == 2)
            for name, earlier in before.items():
                run.wait(lambda n=num_ranks, name=name: len(run.processes(name)) == n)
                assert len(earlier & run.processes(name)) == min(len(earlier), num_ranks)
        # The spare machine takes a place on the present mesh.
        run.kill("b")
        run.wait(lambda: run.writers("c"))
        assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)
