"""The launcher with spares: a rank that dies or hangs is replaced within its replica, whose other
ranks keep their processes, while the other replicas continue; all move to another mesh together."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.tolerances import FAULTS_FLOAT64
from tests.resilience.test_launch import (
    EXACT,
    REPLICAS,
    killed_at_exit,
    losses,
    output_of,
    processes_of_replica,
    rank_of,
    start,
    wait_for_ranks,
)
from torchtitan_lite.tools.report import check_samples

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")

_STEPS = 250
"""Enough that a replaced rank trains again before the other replica has finished."""
_RESIZED_STEPS = 120
_SETTINGS = (
    *EXACT,
    # So low that differences in rounding do not grow over the steps.
    "--optimizer.lr=1e-4",
    f"--training.steps={_STEPS}",
    "--checkpoint.enable=true",
    "--checkpoint.interval=100000",
    "--checkpoint.ram_interval=1",
    "--debug.sample_ledger=true",
)


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of an undisturbed run, by step."""
    folder = tmp_path_factory.mktemp("undisturbed_losses")
    own = [*_SETTINGS, "--checkpoint.enable=false", "--metrics.log_freq=1"]
    own.append(f"--job.dump_folder={folder / 'run'}")
    launch.run(1, [*launch.SMALL, *own], folder / "log")
    return losses(folder / "run")


@contextmanager
def spared_run(
    folder: Path,
    log: Path,
    *more: str,
    replicas: int,
    ranks: int | str,
    own: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Launch replicas with a spare each, and wait until all have trained."""
    arguments = [*_SETTINGS, *more]
    own = ["--spares=1", *own]
    process = start(folder, log, *arguments, replicas=replicas, ranks=str(ranks), own=own)
    with killed_at_exit(process, folder):
        for name in REPLICAS[:replicas]:
            launch.wait_for_step(folder / name, 3, process, log)
        yield process


def wait_for_spare(folder: Path, replica: int, ranks: int) -> None:
    """Block until a replica of `ranks` has a spare that has imported everything."""
    launch.wait_until(lambda: len(processes_of_replica(folder, replica)) == ranks + 1, 60)
    newest = max(processes_of_replica(folder, replica), key=lambda one: one.create_time())
    # A spare starts no thread until it has imported everything.
    launch.wait_until(lambda: newest.num_threads() > 1, 60)


def num_starts_together(folder: Path) -> int:
    """Return how often this replica has begun to train with the other one."""
    events = launch.events_of(folder)
    return sum(one["event"] == "quorum" and one["replicas"] == 2 for one in events)


def check_run(folder: Path, expected: dict[int, float], steps: int = _STEPS) -> None:
    """Check the losses of all replicas, and that each sample was used once and in order."""
    expected = {step: loss for step, loss in expected.items() if step <= steps}
    assert losses(folder) == pytest.approx(expected, rel=FAULTS_FLOAT64)
    checked = check_samples(folder)
    assert checked.problems == [], checked.summary()
    assert checked.samples == {
        step: list(range(4 * (step - 1), 4 * step)) for step in range(1, steps + 1)
    }


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.timeout(280)
def test_a_dead_rank_is_replaced_within_its_replica(
    tmp_path: Path, undisturbed_losses: dict[int, float], rank: int
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with spared_run(folder, log, replicas=2, ranks=2) as process:
        victim = rank_of(folder, 1, rank)
        others = [rank_of(folder, 0, 0), rank_of(folder, 0, 1), rank_of(folder, 1, 1 - rank)]
        wait_for_spare(folder, 1, 2)
        before = num_starts_together(folder / REPLICAS[1])
        victim.send_signal(signal.SIGKILL)
        launch.wait_until(lambda: f"failed, rank {rank}: killed" in log.read_text(), 20)
        launch.wait_until(lambda: num_starts_together(folder / REPLICAS[1]) > before, 60)
        assert [
            rank_of(folder, 0, 0),
            rank_of(folder, 0, 1),
            rank_of(folder, 1, 1 - rank),
        ] == others
        text = output_of(process, log)
    assert text.count("restarts in") == 1
    assert len(list(folder.glob("launch_logs/*/generation_*"))) == 3
    aborted = [
        one for one in launch.events_of(folder / REPLICAS[0]) if one["event"] == "step_failed"
    ]
    assert len(aborted) <= 1
    check_run(folder, undisturbed_losses)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_a_replica_of_one_rank_is_replaced_by_its_spare(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with spared_run(folder, log, replicas=2, ranks=1) as process:
        for replica in (1, 0):
            victim = rank_of(folder, replica)
            wait_for_spare(folder, replica, 1)
            own = folder / REPLICAS[replica]
            before = num_starts_together(own)
            victim.send_signal(signal.SIGKILL)
            launch.wait_until(lambda own=own, before=before: num_starts_together(own) > before, 60)
        text = output_of(process, log)
    assert text.count("failed, rank 0: killed by SIGKILL") == text.count("restarts in") == 2
    check_run(folder, undisturbed_losses)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_a_stopped_rank_is_named_and_replaced_within_its_replica(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    more = ["--fault_tolerance.hang_timeout_s=6"]
    with spared_run(folder, log, *more, replicas=1, ranks=2) as process:
        survivor = rank_of(folder, 0, 0)
        rank_of(folder, 0, 1).send_signal(signal.SIGSTOP)
        launch.wait_until(lambda: "restarts in" in log.read_text(), 60)
        assert rank_of(folder, 0, 0) == survivor
        text = output_of(process, log)
    assert "failed, rank 1: no progress for" in text and "(stopped)" in text
    check_run(folder, undisturbed_losses)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_a_rank_that_others_ask_to_stop_restarts_its_replica(
    tmp_path: Path, undisturbed_losses: dict[int, float]
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with spared_run(folder, log, replicas=1, ranks=2) as process:
        rank_of(folder, 0, 1).send_signal(signal.SIGTERM)
        text = output_of(process, log)
    assert "replica 0: saved and left, because a process other than the launcher" in text
    assert "replica 0: restarts in" in text
    check_run(folder, undisturbed_losses)


def _give_slots(folder: Path, ranks: int) -> Path:
    """Give replica 1 slots for this number of ranks; return the file that says so."""
    slots = folder.with_name("slots")
    slots.write_text(f'{{"1": {ranks}}}')
    return slots


@contextmanager
def resizable_run(
    folder: Path, log: Path, *own: str, monkeypatch: pytest.MonkeyPatch, faults: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Launch two replicas of two ranks, which may have one, and wait until both train."""
    # Slow enough for some resizes before the last step.
    monkeypatch.setenv("RANK_FAULTS", f"slow=0.1 {faults}")
    more = ["--experimental.custom_import=tests.resilience.rank_faults"]
    more.append(f"--training.steps={_RESIZED_STEPS}")
    own = (*own, f"--slots-file={_give_slots(folder, 2)}")
    with spared_run(folder, log, *more, replicas=2, ranks="1:2", own=own) as process:
        for number in (0, 1):
            launch.wait_until(lambda n=number: f"replica {n}: training" in log.read_text(), 60)
        yield process


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_replicas_are_resized_in_their_processes(
    tmp_path: Path, undisturbed_losses: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with resizable_run(folder, log, monkeypatch=monkeypatch) as process:
        leaders = [rank_of(folder, 0), rank_of(folder, 1)]
        _give_slots(folder, 1)
        _wait_for_resizes(folder, 1, process, log)
        _give_slots(folder, 2)
        _wait_for_resizes(folder, 2, process, log)
        outcome = launch.resize(folder, 2, "--parallelism.tensor_parallel_degree=2")
        assert outcome.returncode == 0, (outcome.stderr, log.read_text())
        for ranks, arguments, why in (
            (3, (), "each replica can have 2 ranks: --nproc-per-replica allows 2"),
            (2, ("--training.steps=7",), "a resize changes [parallelism]"),
        ):
            outcome = launch.resize(folder, ranks, *arguments)
            assert outcome.returncode == 1 and why in outcome.stderr, outcome.stderr
        assert [rank_of(folder, 0), rank_of(folder, 1)] == leaders
        text = output_of(process, log, 200)
    for mesh, why in (
        ("1 rank", "replica 1 has slots for 1"),
        ("2 ranks", "slots are available again"),
        ("2 ranks --parallelism.tensor_parallel_degree=2", "it was requested"),
    ):
        assert f"all replicas resize to {mesh} each in their processes: {why}" in text, text
    check_run(folder, undisturbed_losses, _RESIZED_STEPS)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_replicas_leave_a_mesh_that_fails(
    tmp_path: Path, undisturbed_losses: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with resizable_run(folder, log, monkeypatch=monkeypatch, faults="not_on=1") as process:
        outcome = launch.resize(folder, 1)
        assert outcome.returncode == 1, outcome.stderr
        assert outcome.stderr.startswith("resize: failed: replica "), outcome.stderr
        for number in (0, 1):
            wait_for_ranks(folder, number, 2, log)
        text = output_of(process, log, 200)
    assert "resizing in their processes was not possible" in text
    for path in _leader_logs(folder):
        assert len(list(path.parent.glob("rank_*.log"))) == 2
    check_run(folder, undisturbed_losses, _RESIZED_STEPS)


@pytest.mark.matrix
@pytest.mark.parametrize("phase", ["ready", "left", "started"])
@pytest.mark.timeout(280)
def test_a_rank_that_dies_during_a_resize_leaves_no_trace(
    phase: str,
    tmp_path: Path,
    undisturbed_losses: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with resizable_run(folder, log, monkeypatch=monkeypatch) as process:
        victim = rank_of(folder, 1)
        with resizing(folder, phase):
            victim.send_signal(signal.SIGKILL)
            output_of(process, log, 200)
    check_run(folder, undisturbed_losses, _RESIZED_STEPS)


@pytest.mark.matrix
@pytest.mark.parametrize("phase", ["ready", "left", "started"])
@pytest.mark.timeout(280)
def test_a_stop_during_a_resize_saves(
    phase: str,
    tmp_path: Path,
    undisturbed_losses: dict[int, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    with (
        resizable_run(folder, log, "--grace-s=120", monkeypatch=monkeypatch) as process,
        resizing(folder, phase),
    ):
        process.send_signal(signal.SIGTERM)
        output_of(process, log, 200)
    last = max(losses(folder))
    assert (folder / "checkpoint" / f"step-{last}").is_dir()
    with resizable_run(folder, log, monkeypatch=monkeypatch) as process:
        output_of(process, log, 200)
    check_run(folder, undisturbed_losses, _RESIZED_STEPS)


@pytest.mark.matrix
@pytest.mark.timeout(280)
def test_a_replica_that_waits_for_the_others_leaves_too(
    tmp_path: Path, undisturbed_losses: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the one that has left, it cannot take another step."""
    folder, log = tmp_path / "run", tmp_path / "log"
    with resizable_run(folder, log, "--min-replicas=2", monkeypatch=monkeypatch) as process:
        for number, ranks in enumerate((1, 2, 1), start=1):
            _give_slots(folder, ranks)
            _wait_for_resizes(folder, number, process, log)
        text = output_of(process, log, 200)
    assert "left to resize" not in text, text
    check_run(folder, undisturbed_losses, _RESIZED_STEPS)


@contextmanager
def resizing(folder: Path, phase: str) -> Iterator[None]:
    """Request a resize to one rank each, and run the block once it is in this phase."""
    answer = folder / "resize_answer.json"
    before = len(_logs_of(folder))
    with subprocess.Popen(launch.resize_command(folder, 1), stderr=subprocess.DEVNULL) as request:
        if phase == "started":
            launch.wait_until(lambda: len(_logs_of(folder)) > before, 60)
        else:
            launch.wait_until(lambda: answer.is_file() and phase in answer.read_text(), 60)
        yield
        request.wait(timeout=120)


def _logs_of(folder: Path) -> list[Path]:
    return list(folder.glob(f"launch_logs/{REPLICAS[1]}/generation_*/rank_0.log"))


def _leader_logs(folder: Path) -> list[Path]:
    return [
        max(folder.glob(f"launch_logs/{name}/generation_*")) / "rank_0.log" for name in REPLICAS
    ]


def _wait_for_resizes(
    folder: Path, number: int, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Block until both replicas have trained on their `number`-th mesh after the first."""
    for name in REPLICAS:
        launch.wait_until(lambda name=name: len(_resumes(folder / name)) == number, 120)
        launch.wait_for_step(folder / name, _resumes(folder / name)[-1] + 2, process, log)


def _resumes(folder: Path) -> list[int]:
    """Return the steps at which a replica has resumed."""
    return [one["step"] for one in launch.events_of(folder) if one["event"] == "resume"]
