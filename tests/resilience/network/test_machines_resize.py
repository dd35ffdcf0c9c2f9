"""A live run on several machines moves to another mesh: processes that stay keep their ids, storage
is not read, and losses equal those of a run without faults."""

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.harness import launch
from tests.harness.ranks import REPOSITORY
from tests.harness.tolerances import FAULTS_FLOAT64, RESIZED_FLOAT32_LOSS
from tests.resilience.network.machines import STEP_S, Machines, machines, undisturbed_losses
from tests.resilience.network.namespaces import unavailable_reason
from torchtitan_lite.fault_tolerance.supervision.resize_request import ResizeState

_REASON = unavailable_reason()
pytestmark = [
    # The decisions are tested in unit/coordinator/test_resize, and the agents beside it.
    pytest.mark.matrix,
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    pytest.mark.timeout(600),
]
_STEPS = 40
_TP = "--parallelism.tensor_parallel_degree=2"
_PP = "--parallelism.pipeline_parallel_degree=2"
_MORE = (
    # One sample for each of 4 ranks.
    "--training.local_batch_size=1",
    "--training.global_batch_size=4",
    # So that nothing can be read from storage.
    "--checkpoint.interval=100000",
    "--checkpoint.enable_first_step_checkpoint=false",
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run without faults."""
    return undisturbed_losses(tmp_path_factory.mktemp("undisturbed"), _STEPS, *_MORE)


def _resumes(run: Machines) -> list[int]:
    """Return the steps of the snapshots in shared memory from which the run has resumed."""
    resumes = [one for one in launch.events_of(run.output) if one["event"] == "resume"]
    assert all(one["folder"].endswith("in shared memory") for one in resumes), resumes
    return [one["step"] for one in resumes]


def _check_resizes(
    meshes: list[tuple[int, tuple[str, ...]]],
    expected: list[float],
    tolerance: float,
    tmp_path: Path,
    *more: str,
) -> None:
    """Resize a run to each of the meshes in turn, and compare its losses."""
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        # New processes start while training continues.
        slow_s = STEP_S if len(meshes) == 1 else 2.0
        run.train("a", "b", "c", more=(*_MORE, *more), RANK_FAULTS=f"slow={slow_s}")
        for num_ranks, arguments in meshes:
            before = {name: run.processes(name) for name in "abc"}
            step = run.last_step()
            outcome = launch.resize(run.output, num_ranks, *arguments)
            assert outcome.returncode == 0, (outcome.stderr, run.report())
            # No step is repeated, because each one has a snapshot.
            assert _resumes(run)[-1] >= step
            run.wait_for_step(_resumes(run)[-1] + 3)
            # A spare machine, too.
            run.wait(lambda n=num_ranks: all(len(run.processes(name)) == n for name in "abc"))
            for name, earlier in before.items():
                kept = earlier & run.processes(name)
                assert len(kept) == min(len(earlier), num_ranks)
        assert run.last_step() < _STEPS, "the run ended before its last resize"
        assert run.finish() == pytest.approx(expected, rel=tolerance)
        assert run.num_records() == _STEPS, "a step was repeated"


@pytest.mark.parametrize(
    "meshes",
    [[(2, (_TP,))], [(2, ()), (1, (_TP,)), (2, (_TP, _PP)), (1, ())]],
    ids=["one", "several"],
)
def test_machines_resize_together(
    meshes: list[tuple[int, tuple[str, ...]]], expected: list[float], tmp_path: Path
) -> None:
    _check_resizes(meshes, expected, FAULTS_FLOAT64, tmp_path)


def test_machines_resize_together_in_float32(tmp_path: Path) -> None:
    float32 = "--training.dtype=float32"
    expected = undisturbed_losses(tmp_path / "undisturbed", _STEPS, *_MORE, float32)
    meshes: list[tuple[int, tuple[str, ...]]] = [(2, (_TP,)), (1, ())]
    _check_resizes(meshes, expected, RESIZED_FLOAT32_LOSS, tmp_path / "resized", float32)


def test_meshes_that_the_run_cannot_have(expected: list[float], tmp_path: Path) -> None:
    with machines(tmp_path, "a", "b", steps=_STEPS) as run:
        # A world of four ranks fails at its first step.
        run.train("a", "b", more=_MORE, RANK_FAULTS="slow=0.3 not_on=4")
        for num_ranks, arguments, why in (
            (1, ("--training.steps=7",), "rejected: --training.steps=7 is given, but a resize"),
            (1, ("--parallelism.tensor_parallel_degree=3",), "rejected: "),
            (2, (), "failed: "),
        ):
            outcome = launch.resize(run.output, num_ranks, *arguments)
            assert outcome.returncode == 1 and f"resize: {why}" in outcome.stderr, outcome.stderr
        run.wait_for_step(_resumes(run)[-1] + 3)
        # A process whose training has raised an exception may be replaced.
        run.wait(lambda: [len(run.processes(name)) for name in "ab"] == [1, 1])
        assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)


def _wait_for_answer(run: Machines, state: ResizeState) -> None:
    """Block until the newest answer has this state or a later one."""
    states = list(ResizeState)

    def has_come() -> bool:
        with suppress(OSError, ValueError):
            answer = json.loads((run.output / "resize_answer.json").read_text())
            return states.index(answer["state"]) >= states.index(state)
        return False

    run.wait(has_come)


@pytest.mark.parametrize("fault", ["a rank", "a machine", "the coordinator", "SIGTERM"])
@pytest.mark.parametrize("state", [ResizeState.ACCEPTED, ResizeState.READY, ResizeState.LEFT])
def test_faults_during_a_resize(
    fault: str, state: ResizeState, expected: list[float], tmp_path: Path
) -> None:
    """Whether the resize succeeds or not, the losses stay."""
    with machines(tmp_path, "a", "b", "c", steps=_STEPS) as run:
        # So slow that new processes are ready before the last step, also on a busy machine.
        more = (*_MORE, "--checkpoint.buddy_interval=2")
        run.train("a", "b", "c", more=more, RANK_FAULTS="slow=0.8")
        with subprocess.Popen(
            launch.resize_command(run.output, 2, _TP),
            cwd=REPOSITORY,
            stderr=subprocess.DEVNULL,
        ) as request:
            _wait_for_answer(run, state)
            if fault == "a machine":
                run.kill("b")
            elif fault == "a rank":
                launch.kill([psutil.Process(min(run.processes("b")))])
            elif fault == "the coordinator":
                run.stop_coordinator()
                run.start_coordinator()
            else:
                run.agents["b"].send_signal(signal.SIGTERM)
                assert [run.exit_status(name) for name in "abc"] == [0, 0, 0], run.report()
                step = run.last_step()
                assert step < _STEPS and (run.output / f"checkpoint/step-{step}").is_dir()
                # The next start continues there.
                run.agents.clear()
                run.start("a", *_MORE)
                run.start("b", *_MORE)
            assert run.finish() == pytest.approx(expected, rel=FAULTS_FLOAT64)
            if fault == "a machine":
                # The one that has the request may be lost.
                request.kill()
            assert request.wait(30) is not None
