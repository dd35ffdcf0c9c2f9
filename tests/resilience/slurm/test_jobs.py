"""The script of deploy/slurm on a real Slurm: lost and drained nodes, the time limit, requeued
jobs, and who can read the shared secret."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resilience.scheduled_run import STEPS, check_losses, undisturbed_losses
from tests.resilience.slurm.cluster import Cluster, cluster, unavailable_reason
from tests.resilience.slurm.jobs import SlurmJob

_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]
_NOBODY = "65534"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of an undisturbed run."""
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of three nodes."""
    with cluster(tmp_path / "slurm") as started:
        yield started


def test_the_others_finish_without_a_lost_node(
    slurm: Cluster, expected: list[float], tmp_path: Path
) -> None:
    job = SlurmJob(slurm, tmp_path / "job", "--nodes=3")
    job.wait_for_step(10, num_replicas=3)
    survivors = [rank.pid for node in ("n1", "n2") for rank in job.ranks(node)]
    slurm.power_off("n3")
    job.wait_for_step(10, num_replicas=2)
    assert [rank.pid for node in ("n1", "n2") for rank in job.ranks(node)] == survivors
    slurm.wait(lambda: slurm.node_state("n3").startswith("down"), 120)
    job.wait(lambda: job.last_step(0) == job.last_step(1) == STEPS)
    job.finish()
    assert job.field("Restarts") == "0"
    check_losses(job.run, expected)


def test_a_replica_of_two_nodes_restarts(expected: list[float], tmp_path: Path) -> None:
    with cluster(tmp_path / "slurm", num_nodes=4) as slurm:
        job = SlurmJob(slurm, tmp_path / "job", "--nodes=4", NODES_PER_REPLICA="2")
        job.wait_for_step(5, num_replicas=2)
        (rank,) = job.ranks("n4")
        rank.kill()
        job.wait(lambda: list(job.logs.glob("replica_1-generation_1-node_1.log")))
        job.wait_for_step(6, num_replicas=2)
        job.finish()
        assert not list(job.logs.glob("replica_0-generation_1-*"))
        # The coordinator was notified of the departure.
        assert "Traceback" not in job.log.read_text(), job.report()
        check_losses(job.run, expected)


def test_a_job_that_loses_its_first_node_is_requeued(
    slurm: Cluster, expected: list[float], tmp_path: Path
) -> None:
    job = SlurmJob(slurm, tmp_path / "job", "--nodes=2")
    # With a checkpoint.
    job.wait_for_step(15, num_replicas=2)
    assert job.field("BatchHost") == "n1"
    slurm.power_off("n1")
    job.wait(lambda: job.field("BatchHost") == "n2" and job.field("JobState") == "RUNNING")
    job.finish()
    assert job.field("Restarts") == "1"
    check_losses(job.run, expected, repeated=True)


def test_a_job_leaves_a_drained_node(slurm: Cluster, expected: list[float], tmp_path: Path) -> None:
    job = SlurmJob(slurm, tmp_path / "job", "--nodes=2")
    job.wait_for_step(5, num_replicas=2)
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=maintenance")
    # The job continues until it is asked to leave.
    job.wait_for_step(job.last_step(0) + 5, num_replicas=2)
    assert slurm.node_state("n2") == "draining"
    job.signal("USR1")
    slurm.wait(lambda: slurm.node_state("n2") == "drained", 120)
    job.wait(lambda: job.field("JobState") == "RUNNING")
    assert job.field("NodeList") == "n[1,3]"
    job.finish()
    assert job.field("Restarts") == "1"
    check_losses(job.run, expected)


def test_a_job_at_its_time_limit_saves_and_is_requeued(
    slurm: Cluster, expected: list[float], tmp_path: Path
) -> None:
    # Slurm sends the signal at most a minute too early, and the run takes more than two minutes.
    limit = ("--time=3", "--signal=B:USR1@60")
    job = SlurmJob(slurm, tmp_path / "job", "--nodes=2", *limit, step_s=2.5)
    job.wait(lambda: job.field("Restarts") == "1")
    saved = max(job.last_step(0), job.last_step(1))
    assert 0 < saved < STEPS
    job.wait(lambda: max(job.last_step(0), job.last_step(1)) > saved)
    job.finish()
    # Without a lost or repeated step.
    check_losses(job.run, expected)


def test_only_the_user_can_read_the_secret(slurm: Cluster, tmp_path: Path) -> None:
    job = SlurmJob(slurm, tmp_path / "job", "--nodes=2")
    job.wait_for_step(2, num_replicas=2)
    file = job.logs / "token"
    assert file.stat().st_mode & 0o777 == 0o600
    secret = file.read_text()
    with pytest.raises(RuntimeError, match="Permission denied"):
        _as_nobody(slurm, file)
    for shown in (
        slurm.run("scontrol", "show", "job", "--details", job.id),
        slurm.run("scontrol", "show", "step", job.id),
        slurm.run("scontrol", "write", "batch_script", job.id, "-"),
        slurm.run("squeue", "--format=%all"),
        slurm.run("squeue", "--steps", "--format=%all"),
    ):
        assert shown and secret not in shown
    stored = {path: path.read_bytes() for path in slurm.state.rglob("*") if path.is_file()}
    assert any(b"RANK_FAULTS" in text for text in stored.values())
    assert not any(secret.encode() in text for text in stored.values())
    _check_processes(slurm, secret)
    job.signal("TERM")
    job.finish()
    assert job.field("Restarts") == "0"
    assert not file.exists()
    saved = [int(path.name[5:]) for path in (job.run / "checkpoint").glob("step-*")]
    assert max(saved) == max(job.last_step(0), job.last_step(1)) < STEPS


def _check_processes(slurm: Cluster, secret: str) -> None:
    """Check that only processes of coordinator and training have the secret, in an environment that
    no other user can read, and no command line."""
    holders = 0
    for pid in (pid for node in slurm.nodes for pid in slurm.processes(node)):
        folder = Path("/proc", str(pid))
        try:
            command = (folder / "cmdline").read_text().replace("\0", " ")
            environment = (folder / "environ").read_bytes()
            program = Path(os.readlink(folder / "exe")).name
        except OSError:
            # It has ended.
            continue
        assert secret not in command
        if secret.encode() in environment:
            holders += 1
            assert re.match("python", program), (program, command)
            with pytest.raises(RuntimeError, match="Permission denied"):
                _as_nobody(slurm, folder / "environ")
    assert holders >= 5, "the coordinator, and a torchrun and a rank of each replica"


def _as_nobody(slurm: Cluster, file: Path) -> str:
    user = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    return slurm.run(*user, "cat", str(file), host="n1")
