"""Without replicas, a lost machine costs the steps since the last buddy copy: the state comes from
the memory of the other machines, and the final weights are those of an undisturbed run."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch

from tests.harness import launch
from tests.resilience import machines
from torchtitan_lite.checkpoint.shared_memory.region import Region, SlotState
from torchtitan_lite.core.errors import DamagedSnapshot

_INTERVAL = 5
_STEPS = 45
_SMALL = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--training.local_batch_size=1",
    "--training.global_batch_size=12",
    "--checkpoint.enable=true",
    "--checkpoint.interval=100000",
    f"--checkpoint.buddy_interval={_INTERVAL}",
    "--metrics.log_freq=1",
)
_FOREVER = "--training.steps=100000"
_TO_THE_END = f"--training.steps={_STEPS}"

_REASON = machines.unavailable_reason()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")

Start = Callable[..., machines.MachinesRun]


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Start]:
    """Return a function (ranks on each machine, arguments) -> a run that trains on and on."""
    runs: list[machines.MachinesRun] = []

    def start(counts: tuple[int, ...], *arguments: str) -> machines.MachinesRun:
        run = machines.MachinesRun(tmp_path / "run", counts, *_SMALL, *arguments)
        runs.append(run)
        run.start(_FOREVER)
        return run

    yield start
    for run in runs:
        run.__exit__(None, None, None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, ...]], Path]:
    """Return a function (ranks on each machine) -> the last checkpoint of an undisturbed run."""

    @cache
    def finished(counts: tuple[int, ...]) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        with machines.MachinesRun(folder, counts, *_SMALL) as run:
            run.start(_TO_THE_END)
            assert run.wait() == [0] * sum(counts), run.log.read_text()[-4000:]
        return folder / "checkpoint" / f"step-{_STEPS}"

    return finished


def copied_steps(run: machines.MachinesRun, index: int) -> dict[str, list[int]]:
    """Return the complete steps of the copies on a machine."""
    found = {}
    copies = {name: path for name, path in run.regions(index).items() if name.startswith("buddy-")}
    for name, path in copies.items():
        # A region is damaged until it is created completely.
        with suppress(DamagedSnapshot):
            region = Region.open(path)
            found[name] = sorted(region.complete_slots())
            region.close()
    return found


def wait_for_copies(run: machines.MachinesRun, index: int, step: int) -> None:
    """Block until all copies on a machine have reached `step`."""

    def have_reached() -> bool:
        found = copied_steps(run, index)
        return bool(found) and all(steps and steps[-1] >= step for steps in found.values())

    launch.wait_until(have_reached, 120)


def resumes(run: machines.MachinesRun) -> list[int]:
    return [one["step"] for one in launch.events_of(run.folder) if one["event"] == "resume"]


def finish(run: machines.MachinesRun) -> str:
    """Start the run again, wait for its end, and return the output."""
    run.start(_TO_THE_END)
    statuses = run.wait()
    output = run.log.read_text()
    assert statuses == [0] * sum(run.counts), output[-4000:]
    return output


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("counts", "lost"), [((1, 1), 1), ((1, 1), 0), ((2, 1), 0), ((1, 1, 1), 1)]
)
def test_a_lost_machine_is_restored_from_its_buddy(
    counts: tuple[int, ...], lost: int, start_run: Start, undisturbed: Callable[..., Path]
) -> None:
    run = start_run(counts)
    run.wait_for_step(3 * _INTERVAL)
    run.kill()
    last = launch.steps_of(run.folder)[-1]["step"]
    run.replace(lost)
    # Nothing can be read from storage.
    shutil.rmtree(run.folder / "checkpoint")
    output = finish(run)
    assert "in shared memory, with the buddy copies of ranks" in output
    # A copy takes a step or two, during which the previous one counts.
    assert last - 2 * _INTERVAL <= resumes(run)[-1] <= last
    expected = launch.saved_tensors(undisturbed(counts))
    actual = launch.saved_tensors(run.folder / "checkpoint" / f"step-{_STEPS}")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    # The copies are in memory still: nothing had to be stored before the next step.
    saved = [path.name for path in (run.folder / "checkpoint").glob("step-*")]
    assert saved == [f"step-{_STEPS}"]


@pytest.mark.matrix
def test_a_corrupt_copy_is_named_and_storage_is_used(start_run: Start) -> None:
    run = start_run((1, 1))
    run.wait_for_step(2 * _INTERVAL)
    launch.wait_until((run.folder / "checkpoint" / "step-1" / "manifest.json").exists, 60)
    wait_for_copies(run, 0, _INTERVAL)
    run.kill()
    path = run.regions(0)["buddy-00001.snapshots"]
    region = Region.open(path, writable=True)
    for slot in range(region.num_slots):
        region.data(slot)[1000] ^= 1
    region.close()
    run.replace(1)
    output = finish(run)
    assert re.search(r"not used: .*buddy-00001\.snapshots is damaged: \S+ in slot", output)
    assert resumes(run)[-1] == 1


@pytest.mark.matrix
@pytest.mark.parametrize("first_loss", [False, True])
def test_a_machine_lost_before_the_first_copy_after_a_resume_is_restored(
    first_loss: bool, start_run: Start
) -> None:
    run = start_run((1, 1))
    wait_for_copies(run, 0, 2 * _INTERVAL)
    wait_for_copies(run, 1, 2 * _INTERVAL)
    run.kill()
    copied = min(max(some) for one in (0, 1) for some in copied_steps(run, one).values())
    if first_loss:
        run.replace(1)
    shutil.rmtree(run.folder / "checkpoint")
    # At this rate the first copy takes seconds.
    run.start(_FOREVER, "--checkpoint.buddy_mib_per_s=1")
    launch.wait_until(lambda: len(resumes(run)) == 1, 120)
    begun = resumes(run)[0]
    launch.wait_until(lambda: launch.steps_of(run.folder)[-1]["step"] >= begun + 2, 120)
    run.kill()
    assert max(map(max, copied_steps(run, 0).values())) <= begun, "a new copy is complete"
    run.replace(1)
    assert "in shared memory, with the buddy copies of ranks" in finish(run)
    assert copied - _INTERVAL <= resumes(run)[-1] <= begun


@pytest.mark.matrix
def test_copies_of_an_abandoned_generation_are_not_restored(start_run: Start) -> None:
    run = start_run((1, 1))
    wait_for_copies(run, 0, 4 * _INTERVAL)
    run.kill()
    abandoned = max(copied_steps(run, 0)["buddy-00001.snapshots"])
    # The next generation goes back to step 1, and is lost before it reaches the abandoned step.
    run.start(_FOREVER, "--checkpoint.load_step=1")
    launch.wait_until(lambda: resumes(run)[-1:] == [1], 120)
    launch.wait_until(lambda: launch.steps_of(run.folder)[-1]["step"] in range(3, 10), 120)
    run.kill()
    last = launch.steps_of(run.folder)[-1]["step"]
    assert last < abandoned
    run.replace(1)
    finish(run)
    assert resumes(run)[-1] <= last


@pytest.mark.matrix
def test_training_and_copies_survive_a_process_killed_during_a_copy(start_run: Start) -> None:
    # At this rate a copy takes seconds.
    run = start_run((1, 1), "--checkpoint.buddy_mib_per_s=1", "--checkpoint.ram_interval=1")
    run.wait_for_step(2)

    def copying() -> int | None:
        """Return the step that machine 0 is receiving."""
        path = run.regions(0).get("buddy-00001.snapshots")
        if path is None:
            return None
        try:
            region = Region.open(path)
        except DamagedSnapshot:
            return None
        steps = [one.step for one in region.slots() if one.state == SlotState.COPYING]
        region.close()
        return steps[0] if steps else None

    launch.wait_until(lambda: copying() is not None, 60)
    step = copying()
    newest = launch.steps_of(run.folder)[-1]["step"]
    launch.wait_until(lambda: launch.steps_of(run.folder)[-1]["step"] >= newest + 3, 60)
    # Snapshots go on during the copy.
    own = Region.open(run.regions(1)["rank-00001.snapshots"])
    assert max(own.complete_slots()) > newest
    own.close()
    assert copying() == step, "the copy ended too soon for this test"
    killed = 0
    for pid in run.machines[1].processes():
        command = " ".join(psutil.Process(pid).cmdline())
        if "checkpoint.background.buddy" in command:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    assert killed == 1
    wait_for_copies(run, 0, step or 0)
    time.sleep(0.1)
    assert "has died. It is started again." in run.log.read_text()
    assert all(process.poll() is None for process in run.processes)
