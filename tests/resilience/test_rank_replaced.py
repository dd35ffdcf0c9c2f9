"""A rank that dies costs one rank: a spare takes its place, the other ranks keep their processes,
and the final state is bitwise that of an undisturbed run (`train --nproc N --spares K`)."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.harness import launch
from tests.resilience.spared_run import SparedRun

_EXPERTS = ("--model.name=qwen3", "--model.flavor=tiny_moe")
_MESHES = {
    "fsdp-2": (),
    "fsdp-4": (),
    "fsdp-2-tp-2": ("--parallelism.tensor_parallel_degree=2",),
    "pp-2-fsdp-2": ("--parallelism.pipeline_parallel_degree=2",),
    "ep-4": (*_EXPERTS, "--parallelism.expert_parallel_degree=4"),
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "rank"),
    [("fsdp-2", 1), ("fsdp-2-tp-2", 2), ("fsdp-4", 0), ("pp-2-fsdp-2", 1), ("ep-4", 3)],
)
def test_a_spare_takes_the_place_of_a_killed_rank(
    mesh: str, rank: int, runs: list[SparedRun], tmp_path: Path
) -> None:
    last = 40
    num_ranks = 2 if mesh == "fsdp-2" else 4
    arguments = (*_MESHES[mesh], f"--training.steps={last}")
    undisturbed = SparedRun(tmp_path / "undisturbed", num_ranks, 0, *arguments)
    runs.append(undisturbed)
    expected = undisturbed.final_tensors(last)
    run = SparedRun(tmp_path / "run", num_ranks, 1, *arguments, slow="0.2")
    runs.append(run)
    run.wait_for_step(4)
    run.wait_for_spares(num_ranks + 1)
    before, children = run.ranks(), run.children()
    run.kill_rank(rank)
    after = run.ranks()
    assert {r: after[r] for r in after if r != rank} == {r: before[r] for r in before if r != rank}
    assert after[rank] in children and after[rank] not in before.values()
    actual = run.final_tensors(last)
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
    run.final_tensors(20)


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
    run.final_tensors(60)


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_the_last_export_is_replaced(
    rank: int, runs: list[SparedRun], tmp_path: Path
) -> None:
    arguments = (
        *("--training.steps=4", "--checkpoint.last_save_in_hf=true"),
        "--checkpoint.export_file_gb=0.0005",
    )
    exports = []
    for name, faults in (("undisturbed", {}), ("run", {"killed_in_export": str(rank)})):
        run = SparedRun(tmp_path / name, 2, 1, *arguments, **faults)
        runs.append(run)
        assert run.process.wait(180) == 0, run.log.read_text()[-4000:]
        (folder,) = (tmp_path / name / "hf").iterdir()
        exports.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert folder.name == "step-4" and len(exports[0]) > 6
    assert exports[0] == exports[1]
    # The steps are not trained again.
    assert [line["step"] for line in launch.steps_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert f"rank {rank}" in run.log.read_text()


@pytest.mark.matrix
def test_an_error_of_the_program_ends_the_run(runs: list[SparedRun], tmp_path: Path) -> None:
    run = SparedRun(tmp_path / "run", 2, 1, "--training.steps=100", slow="0.1", raises="1:6")
    runs.append(run)
    assert run.process.wait(120) == 1, run.log.read_text()[-4000:]
    text = run.log.read_text()
    assert "in the same way before it made progress" in text
    # Once with progress, and twice without.
    assert (
        len(re.findall(r"^tests.resilience.rank_faults.InjectedError: after", text, re.M)) == 3
    ), text
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
