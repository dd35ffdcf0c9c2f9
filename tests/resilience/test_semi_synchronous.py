"""Replicas that are averaged every few steps: after an average all are bitwise equal, also if one
died and was restarted."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.harness import launch
from tests.harness.replicas import Replicas, replicas

_SYNC = 4
_ARGUMENTS: tuple[str, ...] = (
    *launch.SMALL,
    "--training.dtype=float64",
    "--training.global_batch_size=4",
    "--training.held_out_fraction=0.25",
    "--validation.enable=true",
    f"--validation.freq={_SYNC}",
    "--validation.steps=1",
    "--metrics.log_freq=1",
    f"--checkpoint.interval={_SYNC}",
    f"--fault_tolerance.sync_steps={_SYNC}",
    "--fault_tolerance.process_group_timeout_ms=20000",
)
_METHODS: dict[str, tuple[int, list[str]]] = {
    "local_sgd": (1, []),
    "diloco": (1, []),
    "streaming_diloco": (
        1,
        [
            "--fault_tolerance.num_fragments=2",
            "--fault_tolerance.fragment_sync_delay=1",
            "--fault_tolerance.fragment_update_alpha=0.5",
        ],
    ),
}


def _held_out(run: Replicas, number: int) -> dict[int, float]:
    """Return the loss on the same documents by step, which identifies the weights of a replica."""
    events = launch.events_of(run.output(number))
    return {one["step"]: one["loss"] for one in events if one["event"] == "validation"}


def _check(method: str, num_ranks: int, more: Sequence[str], folder: Path, *, kill: bool) -> None:
    settings = [f"--fault_tolerance.semi_sync_method={method}", *more]
    steps = 100_000 if kill else 6 * _SYNC
    with replicas(folder, num_ranks, [*_ARGUMENTS, *settings, f"--training.steps={steps}"]) as run:
        faults = "slow=0.03" if kill else ""
        run.start(0, faults=faults)
        run.start(1, faults=faults)
        if kill:
            run.wait_for_step(0, _SYNC + 1)
            run.wait_for_step(1, _SYNC + 1)
            run.kill(1)
            run.wait_for_step(0, run.steps(0)[-1]["step"] + _SYNC)
            assert run.steps(0)[-1]["num_replicas"] == 1
            run.start(1, faults=faults)
            while run.steps(0)[-1]["num_replicas"] == 1:
                run.wait_for_step(0, run.steps(0)[-1]["step"] + 1)
            run.wait_for_step(1, run.steps(0)[-1]["step"] + 2 * _SYNC)
            run.stop()
        assert [run.wait(number) for number in run.running] == [0, 0], run.text(0) + run.text(1)
        first, second = _held_out(run, 0), _held_out(run, 1)
        common = sorted(first.keys() & second.keys())
        if method != "streaming_diloco":
            # With streaming, one fragment is equal after an average; the others are still in
            # flight.
            assert len(common) >= 2
            assert [first[step] for step in common] == [second[step] for step in common]
        assert first[common[-1]] < first[min(first)]
        together = [one["loss"] for one in run.steps(0) if one["num_replicas"] == 2]
        of_second = {one["step"]: one["loss"] for one in run.steps(1)}
        assert any(loss not in of_second.values() for loss in together), "they trained on the same"
        if kill:
            happened = {one["event"] for one in launch.events_of(run.output(1))}
            assert {"healed", "averaged"} <= happened


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_diloco_continues_when_a_replica_dies_and_restarts(tmp_path: Path) -> None:
    _check("diloco", 1, [], tmp_path / "run", kill=True)


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("method", _METHODS)
def test_every_method(method: str, kill: bool, tmp_path: Path) -> None:
    num_ranks, more = _METHODS[method]
    _check(method, num_ranks, more, tmp_path / "run", kill=kill)


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_with_fsdp_inside_the_replicas(method: str, tmp_path: Path) -> None:
    more = ["--training.global_batch_size=8"]
    _check(method, 2, more, tmp_path / "run", kill=False)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_a_resume_equals_the_undisturbed_run(method: str, tmp_path: Path) -> None:
    """For one replica; several replicas all resume from the checkpoint of the first."""
    settings = [*_ARGUMENTS, f"--fault_tolerance.semi_sync_method={method}"]
    actual = []
    for name, parts in {"uninterrupted": [16], "resumed": [8, 16]}.items():
        for steps in parts:
            arguments = [*settings, f"--training.steps={steps}"]
            with replicas(tmp_path / name, 1, arguments) as run:
                run.start(0)
                assert run.wait(0) == 0, run.text(0)
        actual.append(launch.saved_tensors(tmp_path / name / "checkpoint" / "step-16"))
    uninterrupted, resumed = actual
    assert uninterrupted.keys() == resumed.keys()
    assert any("outer_momentum" in name for name in uninterrupted) == (method == "diloco")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in uninterrupted.items())
