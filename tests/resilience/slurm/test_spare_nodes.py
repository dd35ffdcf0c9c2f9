"""The batch script of docs/guides/many_machines.md with a spare node, on a real Slurm."""

import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.harness.tolerances import FAULTS_FLOAT64
from tests.resilience.scheduled_run import ARGUMENTS, STEPS, undisturbed_losses
from tests.resilience.slurm.cluster import PARTITION, Cluster, cluster, unavailable_reason

_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]
_GUIDE = REPOSITORY / "docs/guides/many_machines.md"


def _script(arguments: list[str]) -> str:
    """Return the batch script of the guide for three nodes, of which two train."""
    (block,) = (
        block
        for block in re.findall(r"^```bash\n(.*?)^```", _GUIDE.read_text(), re.M | re.S)
        if "srun" in block
    )
    for given, value in {
        "--nodes 5": "--nodes 3",
        "--nnodes 4": "--nnodes 2",
        "--nproc 8": "--nproc 1",
        "--config configs/llama3_8b.toml": " ".join(arguments),
    }.items():
        assert given in block
        block = block.replace(given, value)
    return f"#!/usr/bin/env bash\n#SBATCH --no-kill\n{block}"


def _trains(slurm: Cluster, node: str) -> bool:
    """Whether a node has a checkpoint writer, as those have that train."""
    commands = []
    for pid in slurm.processes(node):
        with suppress(OSError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text())
    return any(re.search(r"rank-\d+\.snapshots", command) for command in commands)


def test_a_spare_node_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    expected = undisturbed_losses(tmp_path / "undisturbed")
    run = tmp_path / "run"
    (tmp_path / "job.sbatch").write_text(_script([*ARGUMENTS, f"--job.dump_folder={run}"]))
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    environment = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "RANK_FAULTS": "slow=0.5"}
    with cluster(tmp_path / "slurm") as slurm:
        options = ("--parsable", "--nodes=3", f"--partition={PARTITION}", "--output=job.log")
        job = slurm.run("sbatch", *options, "job.sbatch", cwd=tmp_path, **environment).strip()

        def report() -> str:
            return slurm.run("scontrol", "show", "job", job) + (tmp_path / "job.log").read_text()

        def last_step() -> int:
            return max((step["step"] for step in launch.steps_of(run)), default=0)

        slurm.wait(lambda: last_step() >= 5, 240, report)
        # A node that trains, without the coordinator.
        victim = next(node for node in ("n2", "n3") if _trains(slurm, node))
        slurm.power_off(victim)
        slurm.wait(lambda: last_step() == STEPS, 240, report)
        slurm.wait(lambda: "JobState=COMPLETED" in report(), 240, report)
        assert "Generation 2 starts. Before it: lost" in report()
    losses = {step["step"]: step["loss"] for step in launch.steps_of(run)}
    assert [losses[step] for step in range(1, STEPS + 1)] == pytest.approx(
        expected, rel=FAULTS_FLOAT64
    )
