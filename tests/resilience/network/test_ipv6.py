"""Runs on machines that have addresses of IPv6 only, not even 127.0.0.1."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.harness.tolerances import FAULTS_FLOAT64
from tests.resilience.network.machines import BUDDIES, machines, undisturbed_losses
from tests.resilience.network.namespaces import Network, unavailable_reason

_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    pytest.mark.timeout(300),
    pytest.mark.matrix,
]
_STEPS = 40


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_machines_train_and_a_lost_one_is_replaced(num_replicas: int, tmp_path: Path) -> None:
    expected = undisturbed_losses(tmp_path / "undisturbed", _STEPS)
    with machines(tmp_path, *"abc", steps=_STEPS, num_replicas=num_replicas, is_v6=True) as run:
        more = BUDDIES if num_replicas == 1 else ()
        slow = {} if num_replicas == 1 else {"RANK_FAULTS": "slow=1.0"}
        run.train(*"abc", more=more, **slow)
        run.wait_for_step(8)
        run.kill("b")
        run.wait(lambda: run.writers("c"))
        if num_replicas > 1:
            run.wait(lambda: launch.steps_of(run.output)[-1]["num_replicas"] == 2)
        assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--nproc=2"),
        ("train", "--nproc=2", "--spares=1"),
        ("train", "--replicas=2", "--nproc=1"),
        ("launch", "--replicas=2", "--nproc-per-replica=2", "--bind=::1", "--"),
        ("launch", "--replicas=2", "--nproc-per-replica=2", "--"),
    ],
    ids=" ".join,
)
def test_one_machine_trains(words: tuple[str, ...], tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    with Network(["a"], is_v6=True) as network:
        command = [*network.command("a"), sys.executable, "-m", "torchtitan_lite", *words]
        arguments = [*launch.SMALL, f"--job.dump_folder={run}", "--training.steps=20"]
        with log.open("wb") as file:
            done = subprocess.run(
                [*command, *arguments],
                cwd=REPOSITORY,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=120,
            )
    assert done.returncode == 0, log.read_text()[-4000:]
