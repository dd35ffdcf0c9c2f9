"""The launcher: a replica loses a rank, restarts and heals, and the run finishes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.harness import launch
from tests.harness.ranks import REPOSITORY, RankFailed
from tests.harness.tolerances import FAULTS_FLOAT64
from torchtitan_lite.tools.report import check_samples

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")

FEW_STEPS, MANY_STEPS = 16, 60
"""Enough steps that an early fault occurs before the end of the run."""
EXACT = ("--training.dtype=float64", "--training.local_batch_size=1")
REPLICAS = ("replica_000", "replica_001")


def start(
    folder: Path,
    log: Path,
    *more: str,
    replicas: int = 2,
    ranks: str = "1",
    own: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Launch a short run with `more` arguments for the trainer, and `own` ones for the launcher."""
    arguments = [
        *launch.SMALL,
        f"--job.dump_folder={folder}",
        f"--training.steps={FEW_STEPS}",
        "--checkpoint.enable=false",
        "--metrics.log_freq=1",
        *more,
    ]
    command = [sys.executable, "-m", "torchtitan_lite", "launch", f"--replicas={replicas}", *own]
    command.append(f"--nproc-per-replica={ranks}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [*command, "--", *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def processes_of_run(folder: Path) -> list[psutil.Process]:
    """Return every process that was started for a run, wherever it is in the process tree."""
    result = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and process.info["status"] != "zombie":
            result.append(process)
    return result


def _replica_of(words: list[str]) -> int | None:
    option = "--fault_tolerance.replica_id"
    return int(words[words.index(option) + 1]) if option in words else None


def processes_of_replica(folder: Path, replica: int) -> list[psutil.Process]:
    """Return the ranks and the spares of a replica."""
    found = []
    for process in processes_of_run(folder):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "torchtitan_lite" in words and _replica_of(words) == replica:
                found.append(process)
    return found


def rank_of(folder: Path, replica: int, rank: int = 0) -> psutil.Process:
    """Return a rank of a replica."""
    deadline = time.monotonic() + 20
    # A process that the rank starts has its command line for a moment.
    while (
        len(result := [one for one in processes_of_run(folder) if _is_rank(one, replica, rank)])
        != 1
    ):
        assert time.monotonic() < deadline, result
        time.sleep(0.02)
    return result[0]


def _is_rank(process: psutil.Process, replica: int, rank: int) -> bool:
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        words = process.cmdline()
        # A spare has no rank in its environment, and prints into the rank's log once it has one.
        output = os.readlink(f"/proc/{process.pid}/fd/1")
        return _replica_of(words) == replica and output.endswith(f"/rank_{rank}.log")
    return False


@contextmanager
def killed_at_exit(process: launch.Process, folder: Path) -> Iterator[None]:
    """At the end of the block, kill what is left of a launched run."""
    try:
        yield
    finally:
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while (left := processes_of_run(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for one in left:
            one.kill()
    assert not left


def output_of(process: launch.Process, log: Path, timeout_s: float = 200) -> str:
    """Return the output of a launcher that must exit with status 0."""
    status = process.wait(timeout=timeout_s)
    text = log.read_text()
    if status != 0:
        raise RankFailed(f"exit status {status}, wanted 0:\n{text[-4000:]}", log)
    return text


def losses(folder: Path) -> dict[int, float]:
    """Return the losses by step, over all replicas below a folder; they must agree on common
    steps."""
    result: dict[int, float] = {}
    for path in folder.rglob("metrics.jsonl"):
        for step in launch.steps_of(path.parent):
            assert result.setdefault(step["step"], step["loss"]) == pytest.approx(
                step["loss"], rel=FAULTS_FLOAT64
            )
    return result


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of an undisturbed run, by step."""
    folder = tmp_path_factory.mktemp("undisturbed_losses")
    own = ["--checkpoint.enable=false", f"--training.steps={MANY_STEPS}", "--metrics.log_freq=1"]
    own.append(f"--job.dump_folder={folder / 'run'}")
    launch.run(1, [*launch.SMALL, *EXACT, *own], folder / "log")
    return losses(folder / "run")


@pytest.mark.matrix
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.timeout(280)
def test_a_stopped_rank_is_named_and_replaced(
    tmp_path: Path, undisturbed_losses: dict[int, float], replicas: int
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    hangs = ["--checkpoint.enable=true", "--fault_tolerance.hang_timeout_s=6"]
    process = start(folder, log, *EXACT, *hangs, replicas=replicas, ranks="2")
    last = replicas - 1
    with killed_at_exit(process, folder):
        launch.wait_for_step(folder / REPLICAS[last], 3, process, log)
        rank_of(folder, last, 1).send_signal(signal.SIGSTOP)
        text = output_of(process, log)
    match = re.search(rf"replica {last}: failed, rank 1: no progress for (\S+) s in .*", text)
    assert match is not None, text
    assert float(match[1]) >= 6
    assert "(stopped)" in match[0] and "rank 0 waits in gloo:" in match[0]
    generations = folder / "launch_logs" / REPLICAS[last]
    report = (generations / "generation_00" / "hang.txt").read_text()
    of_waiting, of_stopped = report.partition("rank 0, process ")[2].split("rank 1, process ")
    assert "train_step" in of_waiting and "waits in gloo:" in of_waiting
    assert "T (stopped)" in of_stopped
    assert f"replica {last}: finished" in text
    if replicas == 1:
        # Otherwise the other replica may finish before this one restarts.
        last_step = f"step {FEW_STEPS}/{FEW_STEPS}"
        assert last_step in (generations / "generation_01" / "rank_0.log").read_text()
    expected = {step: loss for step, loss in undisturbed_losses.items() if step <= FEW_STEPS}
    assert losses(folder) == pytest.approx(expected, rel=FAULTS_FLOAT64)


def wait_for_ranks(folder: Path, replica: int, number: int, log: Path) -> None:
    """Block until the newest generation of a replica has `number` ranks and has committed a
    step."""
    generations, deadline = folder / "launch_logs" / REPLICAS[replica], time.monotonic() + 120
    while True:
        newest = max(generations.glob("generation_*"))
        logs = list(newest.glob("rank_*.log"))
        if len(logs) == number and any("\nstep " in path.read_text() for path in logs):
            return
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)


@pytest.mark.matrix
@pytest.mark.parametrize(("replicas", "where"), [(1, " in their processes"), (2, "")])
@pytest.mark.timeout(280)
def test_a_resized_run_has_the_losses_of_an_undisturbed_one(
    tmp_path: Path, undisturbed_losses: dict[int, float], replicas: int, where: str
) -> None:
    """Without snapshots in shared memory all replicas save, leave and start again."""
    folder, log, slots = tmp_path / "run", tmp_path / "log", tmp_path / "slots"
    slots.write_text("{}")
    more = [f"--training.steps={MANY_STEPS}", "--checkpoint.enable=true"]
    more += ["--debug.sample_ledger=true"]
    if not where:
        more += ["--checkpoint.ram_interval=0"]
    own = [f"--slots-file={slots}"]
    process = start(folder, log, *EXACT, *more, replicas=replicas, ranks="1:2", own=own)
    last = replicas - 1
    with killed_at_exit(process, folder):
        launch.wait_for_step(folder / REPLICAS[last], 3, process, log)
        slots.write_text(f'{{"{last}": 1}}')
        wait_for_ranks(folder, last, 1, log)
        slots.write_text(f'{{"{last}": 2}}')
        text = output_of(process, log, 200)
    assert f"resize to 1 rank each{where}: replica {last} has slots for 1" in text
    assert f"resize to 2 ranks each{where}: slots are available again" in text
    assert len(list(folder.glob("launch_logs/*/generation_*/rank_*.log"))) == 5 * replicas
    assert losses(folder) == pytest.approx(undisturbed_losses, rel=FAULTS_FLOAT64)
    checked = check_samples(folder)
    assert checked.problems == [], checked.summary()
    assert checked.samples == {
        step: list(range(4 * (step - 1), 4 * step)) for step in range(1, MANY_STEPS + 1)
    }


@pytest.mark.matrix
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_loses_a_rank_recovers_and_all_finish(replicas: int, tmp_path: Path) -> None:
    folder, log, last = tmp_path / "run", tmp_path / "log", replicas - 1
    process = start(folder, log, replicas=replicas)
    started_with = {process.pid}
    with killed_at_exit(process, folder):
        launch.wait_for_step(folder / REPLICAS[last], 4, process, log)
        started_with |= {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
        rank_of(folder, last).send_signal(signal.SIGKILL)
        text = output_of(process, log)
    assert not {pid for pid in started_with if psutil.pid_exists(pid)}
    assert f"replica {last}: failed, rank 0: killed by SIGKILL" in text
    assert f"replica {last}: restarts in 0.1 s" in text
    for line in (
        r"^.{8} replica \d: finished at step \d+$",
        r"^replica \d: goodput \d+\.\d% of \d+ s",
    ):
        assert len(re.findall(line, text, re.MULTILINE)) == replicas
    for name in REPLICAS[:replicas]:
        assert launch.steps_of(folder / name)[-1]["step"] == FEW_STEPS
    logs = folder / "launch_logs"
    # It may join later than the other replica, so its first step is unknown.
    first_generation = (logs / REPLICAS[last] / "generation_00" / "rank_0.log").read_text()
    assert re.search(rf"^step \d+/{FEW_STEPS} ", first_generation, re.MULTILINE)
    last_step = f"step {FEW_STEPS}/{FEW_STEPS}"
    assert last_step in (logs / REPLICAS[last] / "generation_01" / "rank_0.log").read_text()
    assert not any("torchft::" in path.read_text() for path in logs.rglob("*.log"))


@pytest.mark.matrix
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("replicas", "ranks"), [(1, "2"), (2, "1")])
def test_a_replica_that_others_ask_to_stop_saves_and_is_started_again(
    tmp_path: Path, undisturbed_losses: dict[int, float], replicas: int, ranks: str
) -> None:
    """The signal of a memory daemon or a scheduler to one rank is not a wish of the user."""
    folder, log, last = tmp_path / "run", tmp_path / "log", replicas - 1
    more = [f"--training.steps={MANY_STEPS}", "--checkpoint.enable=true"]
    process = start(folder, log, *EXACT, *more, replicas=replicas, ranks=ranks)
    with killed_at_exit(process, folder):
        launch.wait_for_step(folder / REPLICAS[last], 3, process, log)
        rank_of(folder, last).send_signal(signal.SIGTERM)
        text = output_of(process, log)
    assert f"replica {last}: saved and left, because a process other than the launcher" in text
    assert f"replica {last}: restarts in" in text
    if replicas == 1:
        assert (
            "Resumed from"
            in (folder / "launch_logs" / REPLICAS[0] / "generation_01" / "rank_0.log").read_text()
        )
        assert launch.steps_of(folder / REPLICAS[0])[-1]["step"] == MANY_STEPS
    assert losses(folder) == pytest.approx(undisturbed_losses, rel=FAULTS_FLOAT64)


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_a_replica_is_not_started_again_if_the_launcher_is_asked_to_stop_too(
    tmp_path: Path,
) -> None:
    """As when a machine shuts down: all processes receive the signal, the launcher among them."""
    folder, log = tmp_path / "run", tmp_path / "log"
    more = ["--training.steps=100000", "--checkpoint.enable=true"]
    process = start(folder, log, *more, replicas=1)
    with killed_at_exit(process, folder):
        launch.wait_for_step(folder / REPLICAS[0], 3, process, log)
        rank_of(folder, 0).send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        text = output_of(process, log)
    assert "replica 0: left" in text and "restarts" not in text
