"""Jobs of deploy/slurm on a real Slurm, submitted as a user does."""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.resilience.scheduled_run import ARGUMENTS, train_together
from tests.resilience.slurm.cluster import ACCOUNT, CPUS_PER_NODE, PARTITION, Cluster

SCRIPT = REPOSITORY / "deploy/slurm/torchtitan_lite.sbatch"
_WAIT_S = 240.0
_FILLED_IN = {
    "--partition=FILL_IN": f"--partition={PARTITION}",
    "--account=FILL_IN": f"--account={ACCOUNT}",
    "--gpus-per-node=8": "--gpus-per-node=1",
    "--cpus-per-task=96": f"--cpus-per-task={CPUS_PER_NODE}",
}
"""What the comments of the script tell a user to fill in."""


class SlurmJob:
    """A job of the script of deploy/slurm. `options` are those of sbatch, `variables` those of the
    script, and `step_s` is added to each step."""

    def __init__(
        self, cluster: Cluster, folder: Path, *options: str, step_s: float = 0.5, **variables: str
    ) -> None:
        self.cluster, self.folder = cluster, folder
        self.run = folder / "run"
        folder.mkdir()
        # The top of a repository, in which the logs of jobs do not remain.
        for name in ("train.py", "configs"):
            (folder / name).symlink_to(REPOSITORY / name)
        text = SCRIPT.read_text()
        for blank, value in _FILLED_IN.items():
            assert blank in text
            text = text.replace(blank, value)
        (folder / SCRIPT.name).write_text(text)
        environment = {
            "PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY),
            "HF_HUB_OFFLINE": "1",
            "GPUS_PER_NODE": "1",
            "RANK_FAULTS": f"slow={step_s}",
            **variables,
        }
        arguments = [*ARGUMENTS, f"--job.dump_folder={self.run}"]
        command = ["sbatch", "--parsable", *options, SCRIPT.name, *arguments]
        self.id = cluster.run(*command, cwd=folder, **environment).strip()
        self.logs = folder / f"torchtitan_lite-{self.id}"
        self.log = self.logs.with_name(f"{self.logs.name}.log")

    def field(self, name: str) -> str:
        """Return what Slurm shows about the job, such as `JobState`; empty if it shows nothing."""
        shown = self.cluster.run("scontrol", "show", "job", self.id)
        match = re.search(rf"\b{name}=(\S*)", shown)
        return match[1] if match else ""

    def signal(self, name: str) -> None:
        """Send a signal to the script, as an administrator does."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", self.id)

    def steps(self, replica: int) -> list[dict[str, Any]]:
        """Return the committed steps that a replica recorded."""
        return launch.steps_of(self.run / f"replica_{replica:03d}")

    def last_step(self, replica: int) -> int:
        return max((step["step"] for step in self.steps(replica)), default=0)

    def wait_for_step(self, step: int, num_replicas: int) -> None:
        """Block until this many replicas take steps together, from `step` on."""
        self.wait(lambda: train_together(self.run, num_replicas, step))

    def wait(self, holds: Callable[[], object]) -> None:
        """Block until the condition holds."""
        self.cluster.wait(holds, _WAIT_S, self.report)

    def finish(self) -> None:
        """Block until the job has ended, and check that it succeeded."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.wait(lambda: self.field("JobState") in ended)
        assert self.field("JobState") == "COMPLETED", self.report()

    def ranks(self, node: str) -> list[psutil.Process]:
        """Return the processes of training on a node."""
        found = []
        for pid in self.cluster.processes(node):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                command = process.cmdline()
                if command[1:2] != ["-m"] and "train.py" in command[:3]:
                    found.append(process)
        return found

    def report(self) -> str:
        """Return what Slurm shows about the job, and the ends of its logs."""
        paths = [*self.folder.glob("*.log"), *self.logs.glob("*.log")]
        logs = [f"--- {path.name}\n{path.read_text()[-2500:]}" for path in sorted(paths)]
        shown = self.cluster.run("scontrol", "show", "job", self.id)
        return "\n".join([shown, *logs])
