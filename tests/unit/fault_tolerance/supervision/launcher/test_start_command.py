"""The command that resumes a run has all options with which it was started."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.cli.train_options import split_options
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.fault_tolerance.supervision.launcher import start_command as module
from torchtitan_lite.fault_tolerance.supervision.launcher.start_command import (
    TRAIN_OPTIONS,
    start_command,
)

_RANK = """\
import json, sys
from torchtitan_lite.fault_tolerance.supervision.launcher.start_command import start_command
print(json.dumps(start_command(["--config", "c.toml", "--training.steps", "8"], 4)))
"""


def started_by_torchrun(folder: Path, options: str, program: str) -> str:
    """Return the command of a rank whose parent is a torchrun with `options`."""
    for name in ("train.py", "main.py"):
        (folder / name).write_text(_RANK)
    (folder / "torchrun").write_text(f"RANK=0 {sys.executable} $RANK_COMMAND; true\n")
    command = f"sh torchrun {options} {program} --config c.toml"
    environment = {
        **os.environ,
        "RANK_COMMAND": f"{program} --config c.toml",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}:{Path.cwd()}",
    }
    if program.startswith("-m"):
        environment["RANK_COMMAND"] = "main.py train --config c.toml"
    done = subprocess.run(
        command.split(), cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    words = json.loads(done.stdout)
    assert Path(words[0]).name == "torchrun"
    return " ".join(words[1:])


@pytest.mark.parametrize(
    ("options", "program"),
    [
        ("--nproc-per-node 2", "train.py"),
        ("--standalone --nproc_per_node=auto", "train.py"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id 7", "train.py"),
        ("--nnodes 2 --nproc-per-node 4", "-m torchtitan_lite train"),
    ],
)
def test_options_of_torchrun(options: str, program: str, tmp_path: Path) -> None:
    resumed = started_by_torchrun(tmp_path, options, program)
    assert resumed == f"{options} {program} --config c.toml --training.steps 8"


def test_replicas_share_the_machines() -> None:
    words = "--nproc=8 --nnodes=6 --replicas=3 --rdzv-endpoint=node0:29520"
    options, _ = split_options(words.split())
    assert options.world_size == 16
    assert " ".join(options.of_replica(2)) == (
        "--fault_tolerance.enable true --fault_tolerance.replica_id 2 "
        "--fault_tolerance.group_size 3"
    )
    with pytest.raises(ConfigError, match="--nnodes 6 is not a multiple of --replicas 4"):
        split_options(words.replace("=3", "=4").split())


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--nproc 2 --config c.toml", "--nproc 4 --config c.toml"),
        ("--spares=1 --nproc=2 --config c.toml", "--nproc 4 --spares 1 --config c.toml"),
        (
            "--config c.toml --nproc-per-node 4 --nnodes 2 --rdzv_endpoint node0:29520 --rdzv-id a "
            "--rdzv-timeout-s 60 --spares 2 --training.steps 3",
            "--nproc 4 --nnodes 2 --rdzv-endpoint node0:29520 --rdzv-id a --rdzv-timeout-s 60 "
            "--spares 2 --config c.toml --training.steps 3",
        ),
        (
            "--nproc 4 --nnodes 4 --replicas 2 --rdzv-endpoint node0:29520 --config c.toml",
            "--nproc 4 --nnodes 4 --replicas 2 --rdzv-endpoint node0:29520 --config c.toml",
        ),
    ],
)
def test_options_of_train(given: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, arguments = split_options(given.split())
    monkeypatch.setenv(TRAIN_OPTIONS, shlex.join(options.kept))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    words = start_command([*arguments, *options.of_replica(1)], 4)
    assert " ".join(words[words.index("train") + 1 :]) == kept


def test_one_rank_needs_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRAIN_OPTIONS, raising=False)
    words = start_command(["--config", "c.toml"], 1)
    assert words[words.index("train") + 1 :] == ["--config", "c.toml"]


@pytest.mark.parametrize("command", [[], ["train"]])
def test_a_rank_of_torchrun_repeats_its_command(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*command, "--config", "c.toml"]
    words = ["python", "/bin/torchrun", "--nnodes", "2", "train.py", *arguments]
    monkeypatch.setattr(module, "command_line", lambda pid: words)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    monkeypatch.setenv("RANK", "1")
    program, *resumed = start_command(["--config", "c.toml", "--x"], 4)
    assert Path(program).name == "torchrun"
    assert resumed == ["--nnodes", "2", "train.py", *command, "--config", "c.toml", "--x"]


@pytest.mark.parametrize(
    ("world_size", "program", "options"),
    [(1, "python", []), (2, "torchrun", ["--nproc-per-node", "2"])],
)
def test_the_script_is_started_by_torchrun_if_it_has_several_ranks(
    world_size: int, program: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "c.toml"])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    first, *rest = start_command(["--config", "c.toml"], world_size)
    assert Path(first).name == program and rest == [*options, "train.py", "--config", "c.toml"]


@pytest.mark.parametrize("words", ["--replicas 1000000", "--nproc=200000 --spares=800000"])
def test_more_processes_than_the_memory_holds_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="--replicas need 1,000,000 processes on this machine"):
        split_options(words.split())
    # On several machines, each has its part.
    options, _ = split_options(
        ["--rdzv-endpoint=10.0.0.1:1", "--replicas=1000000", "--nnodes=1000000"]
    )
    assert options.world_size == 1
