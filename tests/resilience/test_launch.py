"""The launcher as a user calls it: a replica loses a rank, comes back, and the run ends well."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import launch
from tests.failures import RankFailed

REPLICAS = ("replica_000", "replica_001")


def start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    arguments = [
        *launch.SMALL,
        f"--job.dump_folder={folder}",
        "--training.steps=12",
        "--checkpoint.enable=false",
        "--metrics.log_freq=1",
    ]
    command = [sys.executable, "-m", "scripts.launch", "--replicas=2", "--nproc-per-replica=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [*command, "--", *arguments],
            cwd=launch.REPOSITORY,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def of_the_run(folder: Path) -> list[psutil.Process]:
    """Every process that was started for it, wherever it is now."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and process.info["status"] != "zombie":
            found.append(process)
    return found


def _replica_of(words: list[str]) -> int:
    return int(words[words.index("--fault_tolerance.replica_id") + 1])


def rank_of(folder: Path, replica: int) -> psutil.Process:
    """The one rank of a replica."""
    (found,) = (
        process
        for process in of_the_run(folder)
        if "torch.distributed.run" not in process.cmdline()
        and _replica_of(process.cmdline()) == replica
    )
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")
def test_a_replica_that_loses_a_rank_comes_back_and_all_finish(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start(folder, log)
    started_with = {process.pid}
    try:
        launch.wait_for_step(folder / REPLICAS[1], 4, process, log)
        started_with |= {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
        rank_of(folder, 1).send_signal(signal.SIGKILL)
        status = process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while (left := of_the_run(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for one in left:
            one.kill()
    text = log.read_text()
    if status != 0:
        raise RankFailed(f"exit status {status}, wanted 0:\n{text[-4000:]}", log)
    assert not left
    assert not {pid for pid in started_with if psutil.pid_exists(pid)}
    assert "replica 1: failed, rank 0: killed by SIGKILL" in text
    assert "replica 1: restarts in 1 s" in text
    assert len(re.findall(r"^.{8} replica \d: finished$", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^replica \d: goodput \d+\.\d% of \d+ s", text, re.MULTILINE)) == 2
    for name in REPLICAS:
        assert launch.steps_of(folder / name)[-1]["step"] == 12
    logs = folder / "launch_logs"
    # It may have come in later than the other, so its first step is not known.
    first_attempt = (logs / REPLICAS[1] / "attempt_00" / "rank_0.log").read_text()
    assert re.search(r"^step \d+/12 ", first_attempt, re.MULTILINE)
    assert "step 12/12" in (logs / REPLICAS[1] / "attempt_01" / "rank_0.log").read_text()
    assert not any("torchft::" in path.read_text() for path in logs.rglob("*.log"))
