"""`torchtitan-lite train --nproc N` with real processes and signals."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.harness.launch import SMALL, kill, wait_until
from tests.harness.ranks import REPOSITORY, run_command

_started: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Kill the runs that a failed test leaves."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            ranks = psutil.Process(process.pid).children(recursive=True)
            # First what may start others.
            process.kill()
            process.wait()
            for one in ranks:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def start(
    *arguments: str, log: Path, hangup: signal.Handlers = signal.SIG_DFL
) -> subprocess.Popen[bytes]:
    """Start a run that inherits `hangup` for SIGHUP, also if the tests run under nohup."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "torchtitan_lite", "train", *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    finally:
        signal.signal(signal.SIGHUP, before)
    _started.append(process)
    return process


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    wait_until(lambda: len(parent.children()) == 2, 120)
    return parent.children()


def has_stepped(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and '"loss"' in path.read_text()


def num_steps(folder: Path) -> int:
    return (folder / "metrics.jsonl").read_text().count('"loss"')


def run_without_end(folder: Path) -> list[str]:
    steps = ["--training.steps=100000", "--checkpoint.enable=true"]
    return [*SMALL, *steps, f"--job.dump_folder={folder}"]


def test_an_invalid_config_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = ("--nproc=3", *SMALL, f"--job.dump_folder={folder}")
    text = run_command("train", *own, status=1)
    assert len(text.splitlines()) == 1
    assert "but there are 3 processes" in text or "global_batch_size" in text
    assert not folder.exists()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("nproc", "number"),
    # SIGHUP: a closed terminal.
    [(2, signal.SIGINT), (1, signal.SIGINT), (2, signal.SIGHUP)],
)
def test_ctrl_c_saves_and_exits_with_0(nproc: int, number: signal.Signals, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    process = start(f"--nproc={nproc}", *run_without_end(folder), log=log)
    wait_until(lambda: has_stepped(folder), 120)
    # A terminal sends SIGINT to the foreground process group: ranks are in separate sessions.
    process.send_signal(number)
    assert process.wait(120) == 0, log.read_text()
    output = log.read_text()
    assert "Traceback" not in output and "received: finishing the step, then saving" in output
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = max(record["step"] for record in steps)
    assert (folder / "checkpoint" / f"step-{last}").is_dir()


@pytest.mark.matrix
@pytest.mark.parametrize("waits", [False, True])
def test_a_killed_rank_is_one_line_and_an_exit_status(waits: bool, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    process = start("--nproc=2", *run_without_end(folder), log=log)
    ranks = ranks_of(process)
    wait_until(lambda: not waits or has_stepped(folder), 120)
    os.kill(ranks[-1].pid, signal.SIGKILL)
    assert process.wait(120) == 1
    assert "was killed by SIGKILL." in log.read_text()


@pytest.mark.matrix
def test_nohup_survives_a_closed_terminal(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    process = start("--nproc=2", *run_without_end(folder), log=log, hangup=signal.SIG_IGN)
    wait_until(lambda: has_stepped(folder), 120)
    process.send_signal(signal.SIGHUP)
    before_step = num_steps(folder)
    wait_until(lambda: num_steps(folder) > before_step + 3, 120)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0, log.read_text()


@pytest.mark.matrix
def test_a_port_in_use_is_one_line_on_all_ranks(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = (*run_without_end(folder), f"--metrics.prometheus_port={port}")
        process = start("--nproc=2", *arguments, log=log)
        assert process.wait(120) == 1
    output = log.read_text()
    assert "Traceback" not in output and f"127.0.0.1:{port} cannot be opened" in output
    assert not has_stepped(folder)


@pytest.mark.matrix
def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    process = start("--nproc=2", *run_without_end(folder), log=log)
    ranks = ranks_of(process)
    # A rank arranges this before it imports torch. Otherwise it would report the lost agent.
    process.kill()
    process.wait(60)
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    kill(alive)
    assert len(gone) == 2 and not alive
    assert "Error" not in log.read_text() and "ERROR" not in log.read_text()
