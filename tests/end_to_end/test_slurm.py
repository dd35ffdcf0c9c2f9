"""deploy/slurm on this machine: the script itself, with fake Slurm commands that start its steps as
local processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import free_port
from tests.end_to_end.slurm import SCRIPT, write_slurm_commands
from tests.harness.launch import SMALL, steps_of
from tests.harness.ranks import REPOSITORY


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        first = free_port()
        taken = {one.laddr.port for one in psutil.net_connections("tcp") if one.laddr}
        if not taken & set(range(first, first + count)):
            return first


def _wait_for_step(job: subprocess.Popen[str], log: Path, folder: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while not any(line["step"] >= step for line in steps_of(folder)):
        assert job.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_replicas_under_slurm_survive_a_kill_and_leave_on_the_signal(tmp_path: Path) -> None:
    write_slurm_commands(tmp_path / "bin")
    for name in ("train.py", "configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    run = tmp_path / "run"
    arguments = [
        *SMALL,
        f"--job.dump_folder={run}",
        "--training.steps=100000",
        "--checkpoint.enable=true",
        "--checkpoint.interval=100000",
        "--fault_tolerance.process_group=gloo",
    ]
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHON": sys.executable,
        "HF_HUB_OFFLINE": "1",
        "GPUS_PER_NODE": "1",
        "COORDINATOR_PORT": str(_free_ports(3)),
        "SLURM_JOB_NODELIST": "localhost localhost",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_ID": "7",
    }
    log = tmp_path / "job.log"
    with log.open("w") as file:
        job = subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    replicas = [run / f"replica_00{number}" for number in range(2)]
    try:
        for replica in replicas:
            _wait_for_step(job, log, replica, 2)
        (rank,) = [
            one
            for one in psutil.Process(job.pid).children(recursive=True)
            if "--fault_tolerance.replica_id 1" in (words := " ".join(one.cmdline()))
            and "torch.distributed.run" not in words
            and "train.py" in words
            and "torchtitan_lite.sbatch" not in words
        ]
        rank.kill()
        before = steps_of(replicas[1])[-1]["step"]
        # The replica heals, and both train.
        _wait_for_step(job, log, replicas[1], before + 2)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) == 0, log.read_text()[-4000:]
    finally:
        for one in psutil.Process(job.pid).children(recursive=True) if job.poll() is None else ():
            one.kill()
        job.kill()
        job.wait()
    assert "Replica 1 failed, restart 1 of at most 10 in a row" in log.read_text()
    assert {path.name for path in (tmp_path / "job-7").iterdir()} == {
        "coordinator.log",
        "replica_0-generation_0-node_0.log",
        "replica_1-generation_0-node_0.log",
        "replica_1-generation_1-node_0.log",
    }
    # The survivor records every step once, from the first that it joined: on a busy machine its
    # peer may have trained alone before.
    steps = [line["step"] for line in steps_of(replicas[0])]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    newest = max(
        int(path.name.removeprefix("step-")) for path in (run / "checkpoint").glob("step-*")
    )
    assert newest >= before + 2
