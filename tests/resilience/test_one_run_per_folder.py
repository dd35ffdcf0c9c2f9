"""A second run in the folder of a live one is refused, before it reads or writes anything there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from torchtitan_lite.core.errors import FAILED, TRANSIENT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process ids are Linux's")

_SAVES = (
    "--checkpoint.enable=true",
    "--checkpoint.interval=100000",
    "--checkpoint.ram_interval=1",
    "--metrics.log_freq=1",
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of a run that trains."""
    folder = tmp_path_factory.mktemp("live")
    run, log = folder / "run", folder / "log"
    arguments = [*launch.SMALL, *_SAVES, "--training.steps=100000", f"--job.dump_folder={run}"]
    process = launch.start(1, arguments, log)
    try:
        launch.wait_for_step(run, 2, process, log)
        yield run
        assert process.poll() is None, log.read_text()[-4000:]
    finally:
        launch.end(process)


def _second(folder: Path, log: Path, status: int, *more: str) -> str:
    arguments = [*launch.SMALL, *_SAVES, "--training.steps=2", f"--job.dump_folder={folder}"]
    return launch.run(1, [*arguments, *more], log, status=status)


def test_a_second_run_is_refused(live: Path, tmp_path: Path) -> None:
    holder = json.loads((live / "lease.json").read_text())
    output = _second(live, tmp_path / "log", TRANSIENT)
    (line,) = [line for line in output.splitlines() if "is in use" in line]
    assert f"{live} is in use by process {holder['pid']} on {holder['host']} since 20" in line
    assert "Resumed" not in output and "Traceback" not in output
    steps = [line["step"] for line in launch.steps_of(live)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.matrix
def test_a_copy_of_its_folder_is_refused(live: Path, tmp_path: Path) -> None:
    """Its snapshots in shared memory are those of the live run."""
    copy = tmp_path / "copy"
    shutil.copytree(live, copy, ignore=shutil.ignore_patterns("lease.json", "tb"))
    output = _second(copy, tmp_path / "log", FAILED)
    assert f"Delete {copy / 'run_id'}, so that it becomes a run of its own." in output
    (copy / "run_id").unlink()
    output = _second(copy, tmp_path / "log_2", 0)
    assert "shared memory" not in output
    assert not (copy / "lease.json").exists()


@pytest.mark.matrix
def test_a_launch_and_a_spared_run_are_refused(live: Path, tmp_path: Path) -> None:
    words = [*launch.SMALL, f"--job.dump_folder={live}"]
    for number, options in enumerate(
        (
            ["train", "--spares=1", *words],
            ["train", "--nproc=2", *words],
            ["launch", "--replicas=1", "--nproc-per-replica=1", "--", *words],
        )
    ):
        program = ("-m", "torchtitan_lite", *options)
        output = launch.run(1, [], tmp_path / str(number), status=TRANSIENT, program=program)
        assert "is in use by process" in output and not list(live.glob("replica_*"))


@pytest.mark.matrix
@pytest.mark.parametrize("first", ["launch", "train"])
def test_of_two_that_start_at_once_one_is_refused(first: str, tmp_path: Path) -> None:
    """A launch starts nothing, even if the other one has no replica yet."""
    run, logs = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    words = [*launch.SMALL, f"--job.dump_folder={run}", "--training.steps=100000"]
    second = ["launch", "--replicas=2", "--nproc-per-replica=1", "--", *words]
    commands = [["train", *words] if first == "train" else second, [*second, "--optimizer.lr=0.1"]]
    started = [_start(command, log) for command, log in zip(commands, logs, strict=True)]
    try:
        launch.wait_until(lambda: any(one.poll() is not None for one in started), 60)
        for process in started:
            process.terminate()
        statuses = sorted(process.wait(60) for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    assert statuses == [0, TRANSIENT], texts
    (refused,) = [text for text in texts if "is in use by process" in text]
    assert len(refused.splitlines()) == 1 or "launch" not in commands[texts.index(refused)], refused
    assert "Diagnosis" not in "".join(texts)


def _start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torchtitan_lite", *words],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_is_resumed_at_once_and_a_live_one_waited_for(
    tmp_path: Path, ranks: int
) -> None:
    folder = tmp_path / "run"
    own = [*launch.SMALL, *_SAVES, f"--job.dump_folder={folder}"]
    first = launch.start(ranks, [*own, "--training.steps=100000"], tmp_path / "first")
    launch.wait_for_step(folder, 2, first, tmp_path / "first")
    last = launch.steps_of(folder)[-1]["step"]
    arguments = [*own, f"--training.steps={last + 200}", "--job.when_in_use=wait"]
    waiting = launch.start(ranks, arguments, tmp_path / "second")
    launch.wait_until(lambda: "Waiting: " in (tmp_path / "second").read_text(), 60)
    launch.end(first)
    assert waiting.wait(timeout=120) == 0, (tmp_path / "second").read_text()[-4000:]
    assert "in shared memory at step" in (tmp_path / "second").read_text()
    steps = [line["step"] for line in launch.steps_of(folder)]
    assert steps == list(range(1, max(steps) + 1))
