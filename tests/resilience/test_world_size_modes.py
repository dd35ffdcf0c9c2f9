"""torchft's other world-size modes, with real replicas, one of which dies and is restarted."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.harness.replicas import ENDLESS, Replicas, check_against_undisturbed_run, replicas
from torchtitan_lite.core.outputs import RECEIVES_STATE
from torchtitan_lite.tools.report import check_samples

_BATCH = 4
_ARGUMENTS = (*ENDLESS, f"--training.global_batch_size={_BATCH}")


def _used(run: Replicas, number: int) -> dict[int, list[int]]:
    """Return the samples of the steps that a replica committed, by step."""
    ledger = run.output(number) / "samples_rank_0.jsonl"
    records = list(map(json.loads, ledger.read_text().splitlines()))
    return {
        line["step"]: line["samples"]
        for line, following in pairwise(records)
        if line["event"] == "samples" and following.get("outcome") == "commit"
    }


def _kill_and_restart(run: Replicas, number: int) -> None:
    other = 1 - number
    run.start_together({0: "slow=0.05", 1: "slow=0.05"})
    for one in (0, 1):
        run.wait_for_step(one, 4)
    run.kill(number)
    run.wait_for_step(other, run.steps(other)[-1]["step"] + 4)
    seen = run.log(number).read_text().count(RECEIVES_STATE)
    run.start(number, faults="slow=0.05")
    while run.log(number).read_text().count(RECEIVES_STATE) == seen:
        run.wait_for_step(other, run.steps(other)[-1]["step"] + 1)
    run.wait_for_step(number, run.steps(other)[-1]["step"] + 3)
    run.stop()
    assert [run.wait(one) for one in (0, 1)] == [0, 0], run.text(0) + run.text(1)


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [0, 1])
def test_spares_hold_the_state_ready(tmp_path: Path, killed: int) -> None:
    arguments = [*_ARGUMENTS, "--fault_tolerance.world_size_mode=fixed_with_spares"]
    with replicas(tmp_path / "run", 1, arguments) as run:
        _kill_and_restart(run, killed)
        used = [_used(run, number) for number in (0, 1)]
        for step in used[0].keys() & used[1].keys():
            # One replica has all samples, and the other none.
            full = list(range((step - 1) * _BATCH, step * _BATCH))
            assert sorted(used[number][step] for number in (0, 1)) == [[], full], step
        check_against_undisturbed_run(run, 1, _ARGUMENTS, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_batch_per_replica(tmp_path: Path) -> None:
    arguments = [*_ARGUMENTS, "--fault_tolerance.world_size_mode=dynamic"]
    with replicas(tmp_path / "run", 1, arguments) as run:
        _kill_and_restart(run, 1)
        steps = {step["step"]: step for step in run.steps(0)}
        first, second = _used(run, 0), _used(run, 1)
        last = min(max(first), max(second))
        assert {steps[step]["num_replicas"] for step in range(1, last) if step in steps} == {1, 2}
        checked = check_samples(run.folder)
        assert checked.problems == [], checked.summary()
        place = 0
        for step in range(1, last + 1):
            place += len(checked.samples[step])
            if step in steps:
                assert len(checked.samples[step]) == steps[step]["num_replicas"] * _BATCH
                assert steps[step]["tokens"] == place * 64
        alike = [
            (steps[step["step"]]["loss"], step["loss"])
            for step in run.steps(1)
            if step["step"] in steps and step["num_replicas"] == 2
        ]
        assert len(alike) > 4
        assert all(one == other for one, other in alike)
