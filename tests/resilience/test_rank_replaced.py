"""A rank that dies costs one rank: a spare takes its place, the other ranks keep their processes,
and the final state is bitwise that of an undisturbed run (`train --nproc N --spares K`)."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from tests import launch
from torchtitan_lite.checkpoint.shared_memory import folder as shared
from torchtitan_lite.errors import CheckpointError

_RECOVERED_S = 60.0
"""Time limit for a recovery, which takes 2 s on an idle machine (`benchmarks/recovery.py`)."""
_SMALL = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--training.global_batch_size=8",
    "--checkpoint.enable=true",
    "--checkpoint.interval=100000",
    "--checkpoint.ram_interval=1",
    "--metrics.log_freq=1",
    "--experimental.custom_import=tests.rank_faults",
)
_EXPERTS = ("--model.name=qwen3", "--model.flavor=tiny_moe")
_MESHES = {
    "fsdp-4": (),
    "fsdp-2-tp-2": ("--parallelism.tensor_parallel_degree=2",),
    "pp-2-fsdp-2": ("--parallelism.pipeline_parallel_degree=2",),
    "ep-4": (*_EXPERTS, "--parallelism.expert_parallel_degree=4"),
}


class SparedRun:
    """A run with spares, as a user starts it."""

    def __init__(
        self, folder: Path, num_ranks: int, num_spares: int, *arguments: str, **faults: str
    ):
        self.folder, self.log = folder, folder.with_suffix(".log")
        self.num_ranks = num_ranks
        self.arguments = (*_SMALL, f"--job.dump_folder={folder}", *arguments)
        command = [sys.executable, "-m", "torchtitan_lite", "train", f"--nproc={num_ranks}"]
        spares = [f"--spares={num_spares}"] if num_spares else []
        given = " ".join(f"{name}={value}" for name, value in faults.items())
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *spares, *self.arguments],
                cwd=launch.REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "RANK_FAULTS": given},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def children(self) -> set[int]:
        """Return the process ids of ranks and spares."""
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank whose checkpoint writer runs, which begins after its
        first step."""
        found = {}
        for pid in self.children():
            with suppress(psutil.NoSuchProcess):
                for writer in psutil.Process(pid).children():
                    match = re.search(r"rank-(\d+)\.snapshots", " ".join(writer.cmdline()))
                    if match:
                        found[int(match[1])] = pid
        return found

    def last_step(self) -> int:
        """Return the newest step in metrics.jsonl."""
        return max((line["step"] for line in launch.steps_of(self.folder)), default=0)

    def wait_for_step(self, step: int) -> None:
        """Block until the run has taken `step`."""
        launch.wait_for_step(self.folder, step, self.process, self.log)

    def wait_for_spares(self, num_processes: int) -> None:
        """Block until there are so many processes, spares included, and those are warm."""
        launch.wait_until(lambda: len(self.children()) == num_processes, 60)
        spares = self.children() - set(self.ranks().values())
        # A spare starts no thread until it has imported everything.
        launch.wait_until(lambda: all(_is_parked(pid) for pid in spares), 60)

    def resumes(self) -> list[int]:
        """Return the steps at which the run has resumed."""
        return [one["step"] for one in launch.events_of(self.folder) if one["event"] == "resume"]

    def kill_rank(self, rank: int) -> float:
        """Kill a rank, and return the seconds until the run has resumed and taken a step."""
        before, step, resumes = self.ranks(), self.last_step(), len(self.resumes())
        assert len(before) == self.num_ranks
        os.kill(before[rank], signal.SIGKILL)
        started = time.monotonic()
        launch.wait_until(
            lambda: len(self.resumes()) > resumes or self.process.poll() is not None, _RECOVERED_S
        )
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        assert self.resumes()[-1] >= step - 1, "more than one step is repeated"
        self.wait_for_step(self.resumes()[-1] + 1)
        elapsed_s = time.monotonic() - started
        launch.wait_until(lambda: len(self.ranks()) == self.num_ranks, 60)
        return elapsed_s

    def end(self) -> None:
        """Kill what still runs, and free the shared memory."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        known = self.folder / "run_id"
        deadline = time.monotonic() + 40
        while known.is_file() and time.monotonic() < deadline:
            try:
                shared.free_run(known.read_text().strip())
            except CheckpointError as error:
                if "No run" in str(error):
                    return
                time.sleep(0.2)
            else:
                return


def _is_parked(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess, IndexError):
        return psutil.Process(pid).num_threads() > 1 and psutil.Process(pid).cpu_percent(0.1) < 20
    return True


@pytest.fixture
def runs() -> Iterator[list[SparedRun]]:
    """Runs that end with the test."""
    started: list[SparedRun] = []
    yield started
    for run in started:
        run.end()


def _final_tensors(run: SparedRun, step: int) -> dict[str, torch.Tensor]:
    assert run.process.wait(180) == 0, run.log.read_text()[-4000:]
    assert [line["step"] for line in launch.steps_of(run.folder)] == list(range(1, step + 1))
    return launch.saved_tensors(run.folder / "checkpoint" / f"step-{step}")


@pytest.mark.parametrize(
    ("mesh", "rank"),
    [
        ("fsdp-2-tp-2", 2),
        pytest.param("fsdp-4", 0, marks=pytest.mark.matrix),
        pytest.param("pp-2-fsdp-2", 1, marks=pytest.mark.matrix),
        pytest.param("ep-4", 3, marks=pytest.mark.matrix),
    ],
)
def test_a_spare_takes_the_place_of_a_killed_rank(
    mesh: str, rank: int, runs: list[SparedRun], tmp_path: Path
) -> None:
    last = 40
    arguments = (*_MESHES[mesh], f"--training.steps={last}")
    undisturbed = SparedRun(tmp_path / "undisturbed", 4, 0, *arguments)
    runs.append(undisturbed)
    expected = _final_tensors(undisturbed, last)
    run = SparedRun(tmp_path / "run", 4, 1, *arguments, slow="0.2")
    runs.append(run)
    run.wait_for_step(4)
    run.wait_for_spares(5)
    before, children = run.ranks(), run.children()
    run.kill_rank(rank)
    after = run.ranks()
    assert {r: after[r] for r in after if r != rank} == {r: before[r] for r in before if r != rank}
    assert after[rank] in children and after[rank] not in before.values()
    actual = _final_tensors(run, last)
    assert actual.keys() == expected.keys() and len(expected) > 50
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.matrix
def test_kills_in_a_row_leave_no_groups_threads_or_memory(
    runs: list[SparedRun], tmp_path: Path
) -> None:
    run = SparedRun(tmp_path / "run", 2, 1, "--training.steps=100000")
    runs.append(run)
    run.wait_for_step(5)
    survivor = psutil.Process(run.ranks()[1])
    sizes: list[tuple[int, int, int]] = []
    for _ in range(5):
        run.wait_for_spares(3)
        run.kill_rank(0)
        run.wait_for_step(run.last_step() + 5)
        mib = survivor.memory_info().rss >> 20
        sizes.append((survivor.num_threads(), survivor.num_fds(), mib))
    assert run.ranks()[1] == survivor.pid
    threads, descriptors, mib = zip(*sizes, strict=True)
    assert max(threads) <= threads[0] + 1 and max(descriptors) <= descriptors[0] + 2, sizes
    assert mib[-1] - mib[0] < 60, sizes
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(120) == 0, run.log.read_text()[-4000:]


@pytest.mark.matrix
def test_a_computing_survivor_is_interrupted(runs: list[SparedRun], tmp_path: Path) -> None:
    run = SparedRun(tmp_path / "run", 2, 1, "--training.steps=20", slow="0.1", computes="0:9")
    runs.append(run)
    run.wait_for_step(4)
    run.wait_for_spares(3)
    before = run.ranks()
    run.wait_for_step(9)
    # Rank 1 waits for rank 0.
    time.sleep(1)
    run.kill_rank(1)
    assert run.ranks()[0] == before[0] and run.ranks()[1] != before[1]
    _final_tensors(run, 20)


@pytest.mark.matrix
def test_a_survivor_that_does_not_leave_its_training_is_replaced(
    runs: list[SparedRun], tmp_path: Path
) -> None:
    run = SparedRun(tmp_path / "run", 2, 2, "--training.steps=60", slow="0.1")
    runs.append(run)
    run.wait_for_step(4)
    run.wait_for_spares(4)
    before = run.ranks()
    os.kill(before[0], signal.SIGSTOP)
    run.kill_rank(1)
    assert not set(run.ranks().values()) & set(before.values())
    assert "Rank 0 did not leave its training" in run.log.read_text()
    _final_tensors(run, 60)


@pytest.mark.matrix
def test_an_error_of_the_program_ends_the_run(runs: list[SparedRun], tmp_path: Path) -> None:
    run = SparedRun(tmp_path / "run", 2, 1, "--training.steps=100", slow="0.1", raises="1:6")
    runs.append(run)
    assert run.process.wait(120) == 1, run.log.read_text()[-4000:]
    text = run.log.read_text()
    assert "in the same way before it made progress" in text
    # Once with progress, and twice without.
    assert len(re.findall(r"^tests.rank_faults.InjectedError: after", text, re.M)) == 3, text
    assert "Connection closed" not in text


@pytest.mark.matrix
def test_ranks_and_spares_die_with_the_agent(runs: list[SparedRun], tmp_path: Path) -> None:
    run = SparedRun(tmp_path / "run", 2, 1, "--training.steps=100000")
    runs.append(run)
    run.wait_for_step(3)
    launch.wait_until(lambda: len(run.children()) == 3, 60)
    children = psutil.Process(run.process.pid).children()
    run.process.kill()
    run.process.wait(60)
    assert not psutil.wait_procs(children, timeout=60)[1]
