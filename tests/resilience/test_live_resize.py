"""A live run moves to another mesh in memory: the processes that stay keep their process ids,
nothing is read from storage, and the losses are those of a run that was never resized."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.harness.tolerances import FAULTS_FLOAT64, RESIZED_FLOAT32_LOSS
from tests.resilience.spared_run import SparedRun

_LAST = 60
_TP = "--parallelism.tensor_parallel_degree=2"
_PP = "--parallelism.pipeline_parallel_degree=2"
_CP = "--parallelism.context_parallel_degree=2"
_EP = "--parallelism.expert_parallel_degree=2"
_EXPERTS = ("--model.name=qwen3", "--model.flavor=tiny_moe")
_Mesh = tuple[int, tuple[str, ...]]
"""Number of ranks, and changed arguments."""


def _expected(
    runs: list[SparedRun], folder: Path, *arguments: str, last: int = _LAST
) -> dict[int, float]:
    undisturbed = SparedRun(folder, 1, 0, *arguments)
    runs.append(undisturbed)
    undisturbed.final_tensors(last)
    return undisturbed.losses()


@pytest.mark.parametrize(
    ("dtype", "model", "meshes"),
    [
        # Replicas do the same in test_launch_with_spares.
        pytest.param("float64", (), [(2, ()), (1, ()), (2, (_TP,))], marks=pytest.mark.matrix),
        pytest.param(
            *(
                "float64",
                (),
                [(4, ()), (2, (_TP,)), (3, ()), (4, (_PP,)), (4, (_CP, _TP)), (1, ())],
            ),
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            *("float64", _EXPERTS, [(2, ()), (4, (_EP,)), (2, (_EP,)), (4, (_PP, _EP))]),
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            *("float32", (), [(4, ()), (2, (_TP,)), (4, (_PP,))]), marks=pytest.mark.matrix
        ),
        pytest.param(
            "float64",
            ("--compile.enable=true", "--activation_checkpoint.mode=full"),
            [(2, ()), (1, ()), (2, (_TP,))],
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["two ranks", "dense", "experts", "float32", "compiled, recomputed"],
)
@pytest.mark.timeout(600)
def test_resizes_do_not_change_the_losses(
    dtype: str, model: tuple[str, ...], meshes: list[_Mesh], runs: list[SparedRun], tmp_path: Path
) -> None:
    # Divisible by 3 and 4 ranks, with one sample per microbatch.
    arguments = (
        *(*model, f"--training.dtype={dtype}", f"--training.steps={_LAST}"),
        *("--training.local_batch_size=1", "--training.global_batch_size=12"),
    )
    expected = _expected(runs, tmp_path / "undisturbed", *arguments)
    (num_ranks, changes), *others = meshes
    run = SparedRun(tmp_path / "run", num_ranks, 1, *arguments, *changes, slow="0.4")
    runs.append(run)
    run.wait_for_step(3)
    for num_ranks, changes in others:
        before = run.settled_ranks()
        step = run.last_step()
        outcome = launch.resize(run.folder, num_ranks, *changes)
        assert outcome.returncode == 0, (outcome.stderr, run.log.read_text()[-4000:])
        resumed = [one for one in launch.events_of(run.folder) if one["event"] == "resume"][-1]
        assert resumed["step"] >= step
        assert resumed["folder"].endswith("in shared memory")
        run.num_ranks = num_ranks
        run.wait_for_step(run.resumes()[-1] + 3)
        after = run.settled_ranks()
        assert {r: pid for r, pid in after.items() if r in before} == {
            r: pid for r, pid in before.items() if r < num_ranks
        }
    assert run.last_step() < _LAST, "the run ended before its last resize"
    run.final_tensors(_LAST)
    tolerance = FAULTS_FLOAT64 if dtype == "float64" else RESIZED_FLOAT32_LOSS
    assert run.losses() == pytest.approx(expected, rel=tolerance)
    assert not any(run.shared_memory()), "snapshots outlive the run"


@pytest.mark.matrix
def test_without_room_for_snapshots_the_last_step_is_saved(
    runs: list[SparedRun], tmp_path: Path
) -> None:
    arguments = ("--training.steps=20", "--training.local_batch_size=1")
    expected = _expected(runs, tmp_path / "undisturbed", *arguments, last=20)
    # Less than a snapshot needs.
    arguments += ("--checkpoint.snapshot_gib=0.0001",)
    run = SparedRun(tmp_path / "run", 2, 1, *arguments, slow="0.4")
    runs.append(run)
    run.wait_for_step(3)
    outcome = launch.resize(run.folder, 1)
    assert outcome.returncode == 0, (outcome.stderr, run.log.read_text()[-4000:])
    resumed = [one for one in launch.events_of(run.folder) if one["event"] == "resume"][-1]
    assert resumed["step"] >= 3 and resumed["folder"].endswith(f"step-{resumed['step']}")
    steps = [line["step"] for line in launch.steps_of(run.folder)]
    assert steps[: resumed["step"] + 1] == [*range(1, resumed["step"] + 2)], "a step was repeated"
    run.final_tensors(20)
    assert run.losses() == pytest.approx(expected, rel=FAULTS_FLOAT64)


@pytest.mark.matrix
def test_a_mesh_that_does_not_fit_is_rejected(runs: list[SparedRun], tmp_path: Path) -> None:
    run = SparedRun(tmp_path / "run", 2, 1, "--training.steps=100000")
    runs.append(run)
    run.wait_for_step(3)
    before = run.settled_ranks()
    for num_ranks, arguments, why in (
        (3, (_TP,), "start 2 processes"),
        (2, ("--training.steps=7",), "--training.steps=7 is given, but a resize changes"),
        (2, ("--", "--help"), "-- is given"),
        (2, ("--experimental.custom_import=tests.missing",), "a resize changes [parallelism]"),
        (2, ("--parallelism.tensor_degree=2",), "tensor_degree"),
    ):
        outcome = launch.resize(run.folder, num_ranks, *arguments)
        assert outcome.returncode == 1 and why in outcome.stderr, outcome.stderr
        assert outcome.stderr.startswith("resize: rejected: ")
    # What is not a request is removed, and changes nothing.
    request = run.folder / "resize.json"
    request.write_text('{"mesh": {"num_ranks": "2", "arguments": []}, "id": ""}')
    launch.wait_until(lambda: not request.exists(), 30)
    run.wait_for_step(run.last_step() + 2)
    assert run.settled_ranks() == before and not run.resumes()


@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["raises", "killed"])
def test_a_mesh_that_fails_is_left_again(fault: str, runs: list[SparedRun], tmp_path: Path) -> None:
    batch = ("--training.local_batch_size=1", "--training.global_batch_size=12")
    arguments = (f"--training.steps={_LAST}", *batch)
    expected = _expected(runs, tmp_path / "undisturbed", *arguments)
    # A world of three ranks fails at its first step, or waits long enough to be killed.
    faults = {"not_on": "3"} if fault == "raises" else {"stuck_on": "3"}
    run = SparedRun(tmp_path / "run", 2, 1, *arguments, slow="0.4", **faults)
    runs.append(run)
    run.wait_for_step(3)
    before = run.settled_ranks()
    if fault == "raises":
        outcome = launch.resize(run.folder, 3)
    else:
        command = launch.resize_command(run.folder, 3)
        with subprocess.Popen(
            command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
        ) as request:
            launch.wait_until(
                lambda: "The ranks of this machine change to" in run.log.read_text(), 60
            )
            launch.wait_until(lambda: run.resumes(), 60)
            for pid in run.children() - set(before.values()):
                psutil.Process(pid).send_signal(signal.SIGKILL)
            _, text = request.communicate(timeout=120)
        outcome = subprocess.CompletedProcess(command, request.returncode, "", text)
    assert outcome.returncode == 1, outcome.stderr
    assert outcome.stderr.startswith("resize: failed: "), outcome.stderr
    run.wait_for_step(run.last_step() + 2)
    after = run.settled_ranks()
    if fault == "killed":
        assert after == before
    run.final_tensors(_LAST)
    assert run.losses() == pytest.approx(expected, rel=FAULTS_FLOAT64)


def test_a_run_without_an_agent_does_not_answer(tmp_path: Path) -> None:
    outcome = launch.resize(tmp_path / "missing", 2)
    assert outcome.returncode == 2 and "not the output folder of a run" in outcome.stderr
