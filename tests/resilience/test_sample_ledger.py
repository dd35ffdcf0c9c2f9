"""The sample ledgers of runs killed by SIGKILL prove that every sample was used exactly once."""

import json
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.faulty_trainer import CRASH_POINTS
from tests.harness.replicas import ENDLESS, replicas
from torchtitan_lite.core.outputs import replica_folder, sample_ledger
from torchtitan_lite.tools.report import check_samples

_LAST, _BATCH = 12, 4
_CALL = {"forward": 4 * 6 + 1, "header": 2 * 6 + 1, "order": 2}
"""Number of the call at which the process is killed, if not the seventh."""
_SHORT = ("optimizer.after",)
_POINTS = [
    pytest.param(point, marks=[] if point in _SHORT else [pytest.mark.matrix])
    for point in CRASH_POINTS
    if not point.startswith("iteration.")
]


def _arguments(run: Path) -> list[str]:
    return [
        *launch.SMALL,
        f"--job.dump_folder={run}",
        f"--training.steps={_LAST}",
        "--checkpoint.interval=5",
        "--checkpoint.ram_interval=1",
        "--debug.sample_ledger=true",
    ]


@pytest.mark.parametrize("point", _POINTS)
def test_one_process_killed_at_a_point_of_a_step(point: str, tmp_path: Path) -> None:
    """Ranks of FSDP: `test_crashes`."""
    run, log = tmp_path / "run", tmp_path / "log"
    fault = f"killed_in_call=0:{point}:{_CALL.get(point.partition('.')[0], 7)}"
    launch.run(1, _arguments(run), log, status=-9, program=launch.FAULTY_PROGRAM, FAULTS=fault)
    launch.run(1, _arguments(run), tmp_path / "after.log")
    checked = check_samples(run)
    assert checked.problems == [], checked.summary()
    assert checked.samples == {
        step: list(range(_BATCH * (step - 1), _BATCH * step)) for step in range(1, _LAST + 1)
    }


@pytest.mark.matrix
@pytest.mark.timeout(280)
@pytest.mark.parametrize("point", _POINTS)
def test_a_replica_killed_at_a_point_of_a_step(point: str, tmp_path: Path) -> None:
    """It heals, and both ledgers together are the proof. A planted loss and a planted duplicate are
    found."""
    call = _CALL.get(point.partition(".")[0], 7)
    # In float64 the optimizer divides gradients before its step, which is not a crash point then.
    arguments = [*ENDLESS, "--training.dtype=float32", "--checkpoint.ram_interval=1"]
    with replicas(tmp_path / "run", 1, arguments) as run:
        faults = f"slow=0.05 killed_in_call=0:{point}:{call}"
        run.start_together({0: "slow=0.05", 1: faults})
        assert run.wait(1) == -9, run.text(1)
        run.wait_for_step(0, run.steps(0)[-1]["step"] + 3)
        run.start(1, faults="slow=0.05")
        run.wait_for_step(1, run.steps(0)[-1]["step"] + 4)
        run.stop()
        assert [run.wait(one) for one in (0, 1)] == [0, 0], run.text(0) + run.text(1)
        checked = check_samples(run.folder)
        assert checked.problems == [], checked.summary()
        assert max(checked.samples) >= run.steps(1)[-1]["step"]
        _check_planted(run.folder)


def _check_planted(folder: Path) -> None:
    path = sample_ledger(replica_folder(folder, 1), 0)
    content = path.read_text()
    lines = [json.loads(line) for line in content.splitlines()]
    used = [line for line in lines if line["event"] == "samples" and line["samples"]]
    for planted in (used[-3]["samples"], []):
        used[-1]["samples"] = planted
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert check_samples(folder).problems
    path.write_text(content)
    assert check_samples(folder).problems == []
