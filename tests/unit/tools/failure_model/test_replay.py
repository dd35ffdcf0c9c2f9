"""Replay of a trace as the launcher's slots file."""

import subprocess
import sys
from pathlib import Path

from scripts.replay_trace import replay
from tests.harness.ranks import REPOSITORY
from torchtitan_lite.fault_tolerance.supervision.launcher.resize import SlotsFile
from torchtitan_lite.tools.failure_model import read_trace

TRACE = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n60000,remove,b\n120000,add,e\n180000,remove,e\n"


def test_the_launcher_reads_each_state_of_the_trace(tmp_path: Path) -> None:
    trace, path = tmp_path / "spot.csv", tmp_path / "slots.json"
    trace.write_text(TRACE)
    reported: list[str] = []
    file, seen, waited_s = SlotsFile(path, reported.append), [], []

    def sleep(seconds: float) -> None:
        waited_s.append(seconds)
        if path.exists():
            seen.append(dict(file.read(len(seen))))

    replay(read_trace(trace), path, 2, 2, 0.5, sleep, clock=lambda: 7.0)
    seen.append(dict(file.read(len(seen))))
    # A machine stays with its replica: b was the first of replica 1, and e takes its place.
    assert seen == [{0: 2, 1: 2}, {0: 2, 1: 1}, {0: 2, 1: 2}, {0: 2, 1: 1}]
    assert waited_s == [0, 120, 240, 360]
    assert reported == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["slots.json", "spot.csv"]


def test_the_command_ends_with_the_last_state(tmp_path: Path) -> None:
    trace, path = tmp_path / "spot.csv", tmp_path / "slots.json"
    trace.write_text(TRACE)
    command = [sys.executable, "-m", "scripts.replay_trace", str(trace)]
    command += ["--slots-file", str(path), "--replicas", "2", "--ranks-per-replica", "2"]
    done = subprocess.run(
        [*command, "--speed", "1e6"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == '180 s: {"0": 2, "1": 1}'
    assert path.read_text() == '{"0": 2, "1": 1}'
    trace.write_text("0,drop,a\n")
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2 and "line 1" in done.stderr
    done = subprocess.run(
        [*command, "--speed", "0"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--speed more than 0" in done.stderr
