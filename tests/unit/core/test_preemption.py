"""Signals and orders only set a flag, on which all ranks act alike."""

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.harness.jobs import mesh_for, odd_config
from tests.harness.ranks import WorkerPool
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.preemption import StopRequest, TrainingLeft, stop_on_signals
from torchtitan_lite.training.builders import build
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import StepReport, train


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_is_logged_by_its_rank(
    number: signal.Signals,
    rank: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    logger.addHandler(caplog.handler)
    try:
        stop = StopRequest()
        with caplog.at_level(logging.WARNING, logger.name), stop_on_signals(stop):
            assert not stop.requested
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert stop.requested
    finally:
        logger.removeHandler(caplog.handler)
    records = [record for record in caplog.get_records("call") if number.name in record.message]
    assert {record.getMessage() for record in records} == {
        f"{number.name} received: finishing the step, then saving and exiting."
    }


def test_handlers_are_restored_even_after_an_error() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(RuntimeError, match="inside"), stop_on_signals(StopRequest()):
        assert [signal.getsignal(number) for number in numbers] != before
        raise RuntimeError("inside")
    assert [signal.getsignal(number) for number in numbers] == before


def _leave(folder: Path, signaled: int | None, storage_fails: bool) -> tuple[str, list[str]]:
    """Train, with an order to leave at rank 0 from the second step on and a signal at rank
    `signaled`. Returns what has become of the training, and the checkpoints."""
    config = odd_config(
        folder,
        {
            "training.steps": 4,
            "training.global_batch_size": 2,
            "checkpoint.enable": True,
            "checkpoint.interval": 100,
            "checkpoint.async_mode": "disabled",
        },
    )
    mesh, rank = mesh_for(config), torch.distributed.get_rank()
    is_ordered = False
    stop = StopRequest(lambda: is_ordered)

    def order(state: TrainState, report: StepReport) -> None:
        nonlocal is_ordered
        if report.number == 1:
            is_ordered, stop.was_signaled = rank == 0, rank == signaled
            if storage_fails and rank == 0:
                (folder / "checkpoint").rename(folder / "former")
                (folder / "checkpoint").touch()

    with build(config, mesh, stop) as built:
        try:
            outcome = f"finished: {train(replace(built.job, hooks=[order]))}"
        except TrainingLeft:
            outcome = "left"
    return outcome, sorted(path.name for path in (folder / "checkpoint").glob("step-*"))


def test_ranks_leave_also_if_the_step_cannot_be_saved(
    pools: Callable[[int], WorkerPool], tmp_path: Path
) -> None:
    assert pools(2).run(_leave, tmp_path, None, True) == [("left", [])] * 2


@pytest.mark.parametrize(
    ("signaled", "outcome"),
    [
        (None, "left"),
        pytest.param(0, "finished: False", marks=pytest.mark.matrix),
        (1, "finished: False"),
    ],
)
def test_all_ranks_leave_or_all_stop(
    pools: Callable[[int], WorkerPool], tmp_path: Path, signaled: int | None, outcome: str
) -> None:
    """Whichever rank knows of the order, and whichever of a signal."""
    # Without snapshots in memory, the step is saved also if they leave.
    assert pools(2).run(_leave, tmp_path, signaled, False) == [(outcome, ["step-1", "step-2"])] * 2
