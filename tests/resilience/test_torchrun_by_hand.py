"""Ranks of a torchrun that was started by hand die with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness import launch

_ENDLESS = (*launch.SMALL, "--training.steps=100000", "--checkpoint.enable=false")
_TORCHRUN = {
    "console script": [str(Path(sys.executable).with_name("torchrun"))],
    "module": [sys.executable, "-m", "torch.distributed.run"],
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", _TORCHRUN)
def test_ranks_die_with_a_killed_torchrun(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    own = [*_TORCHRUN[kind], "--nproc-per-node=2", "--rdzv-backend=c10d"]
    own += ["--rdzv-endpoint=localhost:0", "train.py", *_ENDLESS, f"--job.dump_folder={run}"]
    monkeypatch.setattr(launch, "command", lambda *ignored: own)
    process = launch.start(2, (), log, as_user=True)
    ranks: list[psutil.Process] = []
    try:
        launch.wait_for_step(run, 3, process, log)
        ranks = launch.ranks_of(process)
        assert len(ranks) == 2
        process.send_signal(signal.SIGKILL)
        launch.wait_until(lambda: not any(map(_runs, ranks)), 1)
    finally:
        launch.kill(ranks)
        launch.end(process)


@pytest.mark.matrix
def test_ranks_die_if_torchrun_is_killed_while_they_start(tmp_path: Path) -> None:
    """At the earliest time at which the ranks exist: most have not set PR_SET_PDEATHSIG yet."""
    log = tmp_path / "log"
    ranks: list[psutil.Process] = []
    arguments = [*_ENDLESS, f"--job.dump_folder={tmp_path / 'run'}"]
    process = launch.start(2, arguments, log, as_user=True)
    try:
        launch.wait_until(lambda: launch.ranks_of(process), 60)
        # Stopped first, so that it starts no further rank.
        process.send_signal(signal.SIGSTOP)
        ranks = launch.ranks_of(process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert ranks
        launch.wait_until(lambda: not any(map(_runs, ranks)), 5)
    finally:
        launch.kill(ranks)
        launch.end(process)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has not exited. Process 1 of a container may reap nothing."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_DYING_TORCHRUN = """
import ctypes, subprocess, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(rank.pid, flush=True)
ctypes.CDLL(None).syscall(60, 0)  # The end of the main thread only.
"""
_RANK = """
import os, time
from pathlib import Path
from torchtitan_lite.core.rank.supervised import attach_to_launcher
while Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
    time.sleep(0.01)
print("attaches", flush=True)
attach_to_launcher()
time.sleep(60)
"""


def test_a_rank_dies_that_starts_while_its_torchrun_is_dying(tmp_path: Path) -> None:
    """The command line of a dying process is empty before its children are adopted. The end of
    its main thread makes that moment last."""
    script = tmp_path / "torchrun"
    script.write_text(_DYING_TORCHRUN)
    environment = {**os.environ, "RANK": "0", "TORCHELASTIC_RUN_ID": "run"}
    with subprocess.Popen(
        [sys.executable, script, _RANK], env=environment, stdout=subprocess.PIPE, text=True
    ) as torchrun:
        assert torchrun.stdout is not None
        rank = psutil.Process(int(torchrun.stdout.readline()))
        try:
            assert torchrun.stdout.readline() == "attaches\n"
            torchrun.kill()
            torchrun.wait()
            launch.wait_until(lambda: not _runs(rank), 5)
        finally:
            launch.kill([rank])
            torchrun.kill()
