"""`train.py` on a machine with faults, which the variable FAULTS names.

`FAULTS="nan=24 dies=30" python -m tests.faulty_trainer ARGUMENTS`

Numbers are places in the order of samples, at which a step begins. What is not named is as in
`train.py`.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.dying_points import die_at
from tests.snapshots import starts_of
from torchtitan_lite import trainer
from torchtitan_lite.build import state as build_state
from torchtitan_lite.checkpoint import sync_saver
from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.checkpoint.memory.folder import region_files
from torchtitan_lite.checkpoint.memory.region import Region
from torchtitan_lite.cli.train import train_rank
from torchtitan_lite.leaving import leave
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.replica import fault_tolerant, joining
from torchtitan_lite.replica.healing import client, live_state

_RANK = int(os.environ.get("RANK", "0"))


def heal_breaks_off(rank: str) -> None:
    """The first state that this rank receives ends in the middle."""
    fetch_all, calls = client._fetch_all, []

    def breaks_off(link: Any, progress: int, chunks: Any) -> None:
        calls.append(progress)
        if len(calls) > 1:
            fetch_all(link, progress, chunks)
            return
        fetch_all(link, progress, chunks[: (len(chunks) + 1) // 2])
        raise OSError("the network is gone")

    if int(rank) == _RANK:
        client._fetch_all = breaks_off


def dies_as_donor(unused: str) -> None:
    """Ends when a peer has begun to read its tensors."""
    read = live_state.LiveState.read

    def dies(self: live_state.LiveState, start: int, stop: int) -> Any:
        if start >= len(self.header):
            _die()
        return read(self, start, stop)

    live_state.LiveState.read = dies  # pyright: ignore[reportAttributeAccessIssue]


def nan(places: str) -> None:
    """The data of these steps make gradients that are not finite, whenever they are computed."""
    first, _, last = places.partition("-")
    _flip(lambda place: int(first) <= place <= int(last or first))


def nan_until(file: str) -> None:
    """The same, until there is such a file and no step of any replica is under way."""
    _flip(lambda place: not Path(file).exists())


def flips(place: str) -> None:
    """A number in this process is wrong, once."""
    left = [int(place)]

    def once(now: int) -> bool:
        with suppress(ValueError):
            left.remove(now)
            return True
        return False

    _flip(once)


def dies(place: str) -> None:
    """Ends in this step, when its gradients are computed."""
    reduce = fault_tolerant.FaultTolerantReplicas.reduce

    def dies_before(
        self: fault_tolerant.FaultTolerantReplicas, parameters: Any, counts: torch.Tensor
    ) -> None:
        if self._state.cursor == int(place):
            _die()
        reduce(self, parameters, counts)

    fault_tolerant.FaultTolerantReplicas.reduce = dies_before


def dies_in_save(step: str) -> None:
    """Ends when it is to write this step, and its writer too."""
    order, write = WriterProcess.save, sync_saver.write_boxes

    def dies_in_writer(
        self: WriterProcess, slot: int, saved: int, *given: Any, **named: Any
    ) -> bool:
        if saved == int(step):
            assert self._process is not None
            self._process.kill()
            _die()
        return order(self, slot, saved, *given, **named)

    def dies_writing(storage: Any, about: Any, saved: int, *given: Any, **named: Any) -> Any:
        if saved == int(step):
            _die()
        return write(storage, about, saved, *given, **named)

    WriterProcess.save = dies_in_writer  # pyright: ignore[reportAttributeAccessIssue]
    sync_saver.write_boxes = dies_writing


def dies_at(given: str) -> None:
    """RANK:POINT:CALL, a point of `dying_points`."""
    rank, point, call = given.split(":")
    if int(rank) == _RANK:
        die_at(point, int(call))


def dies_taking_over(rank: str) -> None:
    """That rank, as the others have taken their shared memory over and it has not."""

    def late(folder: Path, own: int, *given: Any, **named: Any) -> None:
        for other, path in region_files(folder).items():
            while other != own and len(starts_of(path)) < 2:
                time.sleep(0.02)
        # The others go on to where they wait for this rank.
        time.sleep(1)
        _die()

    if int(rank) == _RANK:
        Region.adopt = late  # pyright: ignore[reportAttributeAccessIssue]


def loses_its_place(given: str) -> None:
    """RANK:PLACE, where that rank believes itself further on than it is."""
    rank, place = map(int, given.split(":"))
    step = trainer.train_step

    def elsewhere(job: trainer.Job) -> trainer.StepReport:
        if rank == _RANK and job.state.cursor == place:
            job.state.cursor += 1
        return step(job)

    trainer.train_step = elsewhere


def comes_late(file: str) -> None:
    """Has restored its state, and joins the others only when there is such a file."""
    join = joining.join

    def later(*given: Any, **named: Any) -> Any:
        Path(file).with_suffix(".waits").touch()
        while not Path(file).exists():
            time.sleep(0.02)
        return join(*given, **named)

    joining.join = later


def halts(file: str) -> None:
    """Stays in a step, when its gradients are computed, once there is such a file."""
    reduce = fault_tolerant.FaultTolerantReplicas.reduce

    def halts_before(*given: Any) -> None:
        while Path(file).exists():
            Path(file).with_suffix(".halted").touch()
            time.sleep(0.02)
        reduce(*given)

    fault_tolerant.FaultTolerantReplicas.reduce = halts_before  # pyright: ignore[reportAttributeAccessIssue]


def slow(seconds: str) -> None:
    """Each step takes so much longer."""
    step = trainer.train_step

    def slower(job: trainer.Job) -> trainer.StepReport:
        time.sleep(float(seconds))
        return step(job)

    trainer.train_step = slower


_FAULTS: dict[str, Callable[[str], None]] = {
    one.__name__: one
    for one in (
        heal_breaks_off,
        dies_as_donor,
        nan,
        nan_until,
        flips,
        dies,
        dies_in_save,
        dies_at,
        dies_taking_over,
        loses_its_place,
        comes_late,
        halts,
        slow,
    )
}


def _flip(strikes: Callable[[int], bool]) -> None:
    """Make a gradient infinite in the first of a step's layers, where the place of the step
    `strikes`."""
    state: list[Any] = []
    build = build_state.TrainState

    def remembered(**parts: Any) -> Any:
        state[:] = [build(**parts)]
        return state[0]

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if isinstance(module, FeedForward) and output.requires_grad and strikes(state[0].cursor):
            output.register_hook(lambda gradient: torch.full_like(gradient, math.inf))

    build_state.TrainState = remembered  # pyright: ignore[reportAttributeAccessIssue]
    nn.modules.module.register_module_forward_hook(hook)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for fault in os.environ.get("FAULTS", "").split():
        name, _, value = fault.partition("=")
        _FAULTS[name](value)
    leave(train_rank(sys.argv[1:]))
