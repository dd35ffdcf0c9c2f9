"""Runs whose processes are killed at arbitrary times lose at most one step after a restart, and end
with bitwise the weights of an undisturbed run."""

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.harness import launch
from tests.harness.faulty_trainer import CRASH_POINTS
from tests.harness.snapshots import generation_ids_of
from tests.harness.tolerances import PARITY_FLOAT64
from torchtitan_lite.checkpoint.shared_memory import folder as shared
from torchtitan_lite.core.errors import CheckpointError
from torchtitan_lite.tools.report import check_samples

_RANKS = 2
_BETWEEN = 8
"""Steps between two kills."""
_LAST = 14
_CALL = {"forward": 4 * 7 + 1, "header": 2 * 7 + 1, "order": 2, "iteration": 14 * 7 + 3}
"""Number of the call at which a rank is killed, if not the eighth: there are four layers, two
headers per step, a save every five steps, and 14 matrices of Muon on each rank."""
_MUON = ("--optimizer.name=Muon",)
KILLED = ("one rank", "all ranks", "one writer", "everything")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose shared memory is freed at the end."""
    folder = tmp_path / "run"
    yield folder
    known = folder / "run_id"
    if known.is_file():
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            try:
                shared.free_run(known.read_text().strip())
                return
            except CheckpointError as error:
                if "No run" in str(error):
                    return
                time.sleep(0.2)


def _writers(ranks: list[psutil.Process]) -> list[psutil.Process]:
    return [
        child
        for rank in ranks
        for child in rank.children()
        if "torchtitan_lite.checkpoint.background" in child.cmdline()
    ]


def _kill(process: launch.Process, what: str) -> list[psutil.Process]:
    """Kill processes with SIGKILL and return the writers that ran."""
    ranks = launch.ranks_of(process)
    writers = _writers(ranks)
    doomed: list[psutil.Process] = []
    if what == "one rank":
        doomed = ranks[1:]
    elif what == "all ranks":
        doomed = ranks
    elif what == "one writer":
        doomed = [writers[1], *ranks]
    elif what == "everything":
        # Suspend the ranks first: a rank without its writer could start another one, which would
        # flush.
        for rank in ranks:
            rank.suspend()
        writers = _writers(ranks)
        doomed = [psutil.Process(process.pid), *writers, *ranks]
    launch.kill(doomed)
    return writers


def _arguments(folder: Path, steps: int) -> list[str]:
    return [
        *launch.SMALL,
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        "--checkpoint.interval=5",
        "--checkpoint.ram_interval=1",
        "--debug.sample_ledger=true",
    ]


def _check_crashes(kills: list[str], run: Path, tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    log, reached = tmp_path / "log", 0
    for what in kills:
        log.unlink(missing_ok=True)
        process = launch.start(_RANKS, _arguments(run, 100_000), log)
        try:
            launch.wait_for_step(run, reached + _BETWEEN, process, log)
            _check_resumed(log.read_text(), reached)
            time.sleep(draws.random() * 0.1)
            _kill(process, what)
            process.wait(timeout=60)
        finally:
            launch.end(process)
        reached = launch.steps_of(run)[-1]["step"]
    log.unlink()
    last = reached + 3
    _check_resumed(launch.run(_RANKS, _arguments(run, last), log), reached)
    undisturbed = tmp_path / "undisturbed"
    launch.run(_RANKS, _arguments(undisturbed, last), tmp_path / "undisturbed.log")
    expected = launch.saved_tensors(undisturbed / "checkpoint" / f"step-{last}")
    actual = launch.saved_tensors(run / "checkpoint" / f"step-{last}")
    assert actual.keys() == expected.keys() and len(expected) > 50
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    accounting = launch.time_accounting_of(run)
    assert accounting["idle_s"] > 0
    # All committed steps are kept, except for one or two before each kill.
    assert accounting["lost_s"] < accounting["compute_s"] + accounting["communication_s"]
    assert 0 < accounting["goodput"] < 1
    checked = check_samples(run)
    assert checked.problems == [] and max(checked.samples) == last, checked.summary()
    run_id = (run / "run_id").read_text().strip()
    assert run_id not in [left.run_id for left in shared.list_runs()]


def _check_resumed(text: str, reached: int) -> None:
    """Check that a run whose newest recorded step is `reached` lost at most that step."""
    match = re.search(r"Resumed from .* at step (\d+)", text)
    assert (match is None) == (reached == 0), text[-3000:]
    # The step in progress is not in the metrics, but may have been committed.
    assert match is None or reached - 1 <= int(match[1]) <= reached + 1, text[-3000:]


@pytest.mark.matrix
def test_a_killed_run_ends_like_an_undisturbed_one(run: Path, tmp_path: Path) -> None:
    _check_crashes(["everything"], run, tmp_path, seed=1)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_twenty_random_times(seed: int, run: Path, tmp_path: Path) -> None:
    _check_crashes(list(KILLED), run, tmp_path, seed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    launch.run(_RANKS, _arguments(folder / "run", _LAST), folder / "log")
    return folder / "run"


@pytest.mark.matrix
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_at_a_point_of_a_step(
    point: str, undisturbed: Path, run: Path, tmp_path: Path
) -> None:
    """Kill the leader and another rank in turns."""
    rank, log = CRASH_POINTS.index(point) % _RANKS, tmp_path / "log"
    call = _CALL.get(point.partition(".")[0], 8)
    fault = f"killed_in_call={rank}:{point}:{call}"
    arguments = _arguments(run, _LAST)
    if point.startswith("iteration."):
        # The other rank waits for its matrices.
        arguments = [*arguments, *_MUON]
        undisturbed = tmp_path / "undisturbed"
        launch.run(_RANKS, [*_arguments(undisturbed, _LAST), *_MUON], tmp_path / "first.log")
    process = launch.start(_RANKS, arguments, log, program=launch.FAULTY_PROGRAM, FAULTS=fault)
    try:
        assert process.wait(timeout=120) != 0, log.read_text()[-3000:]
    finally:
        launch.end(process)
    reached = launch.steps_of(run)[-1]["step"]
    assert 2 <= reached < _LAST
    text = launch.run(_RANKS, arguments, tmp_path / "after.log")
    match = re.search(r"Resumed from .* at step (\d+)", text)
    assert match is not None and reached - 1 <= int(match[1]) <= reached + 1, text[-3000:]
    checked = check_samples(run)
    assert checked.problems == [], checked.summary()
    assert checked.samples == check_samples(undisturbed).samples
    expected, after = (
        launch.saved_tensors(folder / "checkpoint" / f"step-{_LAST}")
        for folder in (undisturbed, run)
    )
    assert after.keys() == expected.keys() and len(expected) > 50
    assert all(torch.equal(after[name], tensor) for name, tensor in expected.items())


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        pytest.param(4, ["--parallelism.tensor_parallel_degree=2"], marks=pytest.mark.matrix),
        (1, []),
    ],
)
def test_another_mesh_resumes_from_snapshots(
    ranks: int, mesh: list[str], run: Path, tmp_path: Path
) -> None:
    exact = ["--training.dtype=float64", "--checkpoint.interval=100000"]
    _kill_everything(run, [*_arguments(run, 100_000), *exact], tmp_path / "log")
    reached = launch.steps_of(run)[-1]["step"]
    last = reached + 4
    text = launch.run(ranks, [*_arguments(run, last), *exact, *mesh], tmp_path / "after.log")
    match = re.search(r"Resumed from step \d+ in shared memory at step (\d+)", text)
    assert match is not None, text[-3000:]
    assert reached - 1 <= int(match[1]) <= reached + 1
    undisturbed = tmp_path / "undisturbed"
    launch.run(_RANKS, [*_arguments(undisturbed, last), *exact], tmp_path / "undisturbed.log")
    expected = {line["step"]: line["loss"] for line in launch.steps_of(undisturbed)}
    after = {line["step"]: line["loss"] for line in launch.steps_of(run)[-3:]}
    assert max(after) == last
    assert after == pytest.approx({step: expected[step] for step in after}, rel=PARITY_FLOAT64)


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [1, 0])
def test_a_crash_during_the_adoption_of_memory_loses_nothing(
    rank: int, run: Path, tmp_path: Path
) -> None:
    """At the crash, some ranks have adopted their memory and others have not."""
    log = tmp_path / "log"
    arguments = [*_arguments(run, 100_000), "--checkpoint.interval=100000"]
    _kill_everything(run, arguments, log)
    resumed = r"Resumed from step \d+ in shared memory at step (\d+)"
    fault = f"killed_during_adoption={rank}"
    process = launch.start(_RANKS, arguments, log, program=launch.FAULTY_PROGRAM, FAULTS=fault)
    try:
        assert process.wait(timeout=120) != 0, log.read_text()[-3000:]
    finally:
        launch.end(process)
    before = re.search(resumed, log.read_text())
    assert before is not None, log.read_text()[-3000:]
    starts = [generation_ids_of(path) for path in _regions(run)]
    assert sorted(map(len, starts)) == [1, 2] and set(starts[rank]) < set(starts[1 - rank])
    last = int(before[1]) + 2
    text = launch.run(_RANKS, _arguments(run, last), tmp_path / "after.log")
    after = re.search(resumed, text)
    assert after is not None and after[1] == before[1], text[-3000:]
    undisturbed = tmp_path / "undisturbed"
    launch.run(_RANKS, _arguments(undisturbed, last), tmp_path / "undisturbed.log")
    expected, actual = (
        launch.saved_tensors(folder / "checkpoint" / f"step-{last}")
        for folder in (undisturbed, run)
    )
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def _kill_everything(run: Path, arguments: list[str], log: Path) -> None:
    """Kill all processes of a run at about its seventh step."""
    process = launch.start(_RANKS, arguments, log)
    try:
        launch.wait_for_step(run, 6, process, log)
        _kill(process, "everything")
        process.wait(timeout=60)
    finally:
        launch.end(process)


def _regions(run: Path) -> list[Path]:
    folder = shared.existing_run_folder((run / "run_id").read_text().strip())
    assert folder is not None
    return [path for _, path in sorted(shared.region_files(folder).items())]


def test_the_newest_snapshot_is_durable_soon_after_a_kill(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [*_arguments(run, 100_000), "--checkpoint.interval=100000"]
    # A flush at the end of the grace period would be far too late.
    process = launch.start(_RANKS, [*arguments, "--checkpoint.preemption_grace_s=90"], log)
    try:
        launch.wait_for_step(run, 6, process, log)
        writers = _kill(process, "all ranks")
        killed_at = time.monotonic()
        reached = launch.steps_of(run)[-1]["step"]
        while not (saved := _saved_steps(run)) or saved[-1] < reached - 1:
            # The goal is 2 s, which `benchmarks.recovery` measures. This machine may be loaded.
            assert time.monotonic() - killed_at < 20
            time.sleep(0.01)
        process.wait(timeout=60)
    finally:
        launch.end(process)
    assert psutil.wait_procs(writers, timeout=30)[1] == []


@pytest.mark.matrix
def test_a_hanging_run_is_saved_before_its_grace_period_ends(run: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [*_arguments(run, 100_000), "--checkpoint.interval=100000"]
    process = launch.start(_RANKS, [*arguments, "--checkpoint.preemption_grace_s=15"], log)
    try:
        launch.wait_for_step(run, 10, process, log)
        ranks = launch.ranks_of(process)
        ranks[1].suspend()
        time.sleep(1)
        reached = launch.steps_of(run)[-1]["step"]
        # A machine that shuts down sends SIGTERM to all processes; the suspended rank cannot handle
        # it.
        for rank in ranks:
            rank.terminate()
        asked_at = time.monotonic()
        while not (saved := _saved_steps(run)) or saved[-1] < reached - 1:
            assert time.monotonic() - asked_at < 15
            time.sleep(0.05)
        assert all(rank.is_running() for rank in ranks)
    finally:
        launch.end(process)


def _saved_steps(run: Path) -> list[int]:
    return sorted(
        json.loads(path.read_text())["step"]
        for path in (run / "checkpoint").glob("step-*/manifest.json")
    )
