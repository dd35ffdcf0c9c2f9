"""`train.py` with injected faults, which the variable FAULTS names.

`FAULTS="nan=24 killed_at=30" python -m tests.harness.faulty_trainer ARGUMENTS`

Positions are positions in the order of samples at which a step begins. Everything else is as in
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

from tests.harness.snapshots import generation_ids_of
from torchtitan_lite.checkpoint import copier, sync_saver
from torchtitan_lite.checkpoint.async_saver import AsynchronousSaver
from torchtitan_lite.checkpoint.background.process import WriterProcess
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.shared_memory.folder import region_files
from torchtitan_lite.checkpoint.shared_memory.region import Region
from torchtitan_lite.cli.train import train_rank
from torchtitan_lite.core.process_exit import exit_process
from torchtitan_lite.fault_tolerance.replica import fault_tolerant, joining
from torchtitan_lite.fault_tolerance.replica.healing import client, live_state
from torchtitan_lite.nn.feed_forward import FeedForward
from torchtitan_lite.optim.newton_schulz import NewtonSchulz
from torchtitan_lite.optim.optimizer import ShardedOptimizer
from torchtitan_lite.training import trainer
from torchtitan_lite.training.builders import state as build_state

_RANK = int(os.environ.get("RANK", "0"))
_CALLS: dict[str, tuple[Any, str]] = {
    "forward": (FeedForward, "forward"),
    "optimizer": (ShardedOptimizer, "_step"),
    "snapshot": (AsynchronousSaver, "_snapshot"),
    "begin": (Region, "begin"),
    "copy": (copier, "foreach_copy_"),
    "complete": (Region, "complete"),
    "header": (Region, "_put_header"),
    "confirm": (Region, "confirm"),
    "order": (WriterProcess, "save"),
    "agreement": (CheckpointManager, "apply_signals"),
    "iteration": (NewtonSchulz, "orthogonalize_"),
}
"""Functions that change the state, its snapshot, or what is recorded of a save."""
CRASH_POINTS = [f"{name}.{when}" for name in _CALLS for when in ("before", "after")]
"""The points for `killed_in_call`; the last two are in the step of Muon only."""


def heal_interrupted(rank: str) -> None:
    """Interrupt the first state transfer to this rank halfway."""
    fetch_all, calls = client.fetch_all, []

    def interrupted(link: Any, progress: int, chunks: Any) -> None:
        calls.append(progress)
        if len(calls) > 1:
            fetch_all(link, progress, chunks)
            return
        fetch_all(link, progress, chunks[: (len(chunks) + 1) // 2])
        raise OSError("the network is gone")

    if int(rank) == _RANK:
        client.fetch_all = interrupted


def donor_killed(unused: str) -> None:
    """Kill this process once a peer has begun to read its tensors."""
    read = live_state.LiveState.read

    def killed(self: live_state.LiveState, start: int, stop: int) -> Any:
        if start >= len(self.header):
            _kill_this_process()
        return read(self, start, stop)

    live_state.LiveState.read = killed  # pyright: ignore[reportAttributeAccessIssue]


def nan(positions: str) -> None:
    """Make the gradients of the steps at `FIRST-LAST` non-finite whenever they are computed."""
    first, _, last = positions.partition("-")
    _corrupt_gradients(lambda position: int(first) <= position <= int(last or first))


def nan_until(file: str) -> None:
    """Make all gradients non-finite until `file` exists."""
    _corrupt_gradients(lambda position: not Path(file).exists())


def nan_once(position: str) -> None:
    """Make a gradient of the step at this position non-finite in its first attempt only."""
    remaining = [int(position)]

    def once(current: int) -> bool:
        with suppress(ValueError):
            remaining.remove(current)
            return True
        return False

    _corrupt_gradients(once)


def killed_at(position: str) -> None:
    """Kill this process in the step at this position, after its gradients are computed."""
    reduce = fault_tolerant.FaultTolerantReplicas.reduce

    def killed_before(
        self: fault_tolerant.FaultTolerantReplicas, parameters: Any, counts: torch.Tensor
    ) -> None:
        if self._state.cursor == int(position):
            _kill_this_process()
        reduce(self, parameters, counts)

    fault_tolerant.FaultTolerantReplicas.reduce = killed_before


def killed_in_save(step: str) -> None:
    """Kill this process and its writer when they begin to save this step."""
    order, write = WriterProcess.save, sync_saver.write_boxes

    def killed_with_writer(
        self: WriterProcess, slot: int, saved: int, *args: Any, **kwargs: Any
    ) -> bool:
        if saved == int(step):
            assert self._process is not None
            self._process.kill()
            _kill_this_process()
        return order(self, slot, saved, *args, **kwargs)

    def killed_while_writing(
        storage: Any, description: Any, saved: int, *args: Any, **kwargs: Any
    ) -> Any:
        if saved == int(step):
            _kill_this_process()
        return write(storage, description, saved, *args, **kwargs)

    WriterProcess.save = killed_with_writer  # pyright: ignore[reportAttributeAccessIssue]
    sync_saver.write_boxes = killed_while_writing


def killed_in_call(value: str) -> None:
    """RANK:POINT:CALL: kill this rank at the n-th call of one of the CRASH_POINTS."""
    rank, point, number = value.split(":")
    if int(rank) != _RANK:
        return
    name, _, when = point.partition(".")
    owner, attribute = _CALLS[name]
    original: Callable[..., Any] = getattr(owner, attribute)
    remaining = [int(number)]

    def killed(*args: Any, **kwargs: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] == 0 and when == "before":
            _kill_this_process()
        result = original(*args, **kwargs)
        if remaining[0] == 0:
            _kill_this_process()
        return result

    setattr(owner, attribute, killed)


def killed_during_adoption(rank: str) -> None:
    """Kill this rank after the others have adopted their shared memory, and before it does."""

    def adopt(folder: Path, own: int, *args: Any, **kwargs: Any) -> None:
        for peer, path in region_files(folder).items():
            while peer != own and len(generation_ids_of(path)) < 2:
                time.sleep(0.02)
        # Let the others reach the point where they wait for this rank.
        time.sleep(1)
        _kill_this_process()

    if int(rank) == _RANK:
        Region.adopt = adopt  # pyright: ignore[reportAttributeAccessIssue]


def wrong_cursor(value: str) -> None:
    """RANK:POSITION: advance the cursor of this rank by one at this position."""
    rank, position = map(int, value.split(":"))
    step = trainer.train_step

    def with_wrong_cursor(job: trainer.Job) -> trainer.StepReport:
        if rank == _RANK and job.state.cursor == position:
            job.state.cursor += 1
        return step(job)

    trainer.train_step = with_wrong_cursor


def delayed_join(file: str) -> None:
    """Delay joining the other replicas, with the state restored, until `file` exists."""
    join = joining.join

    def delayed(*args: Any, **kwargs: Any) -> Any:
        Path(file).with_suffix(".waits").touch()
        while not Path(file).exists():
            time.sleep(0.02)
        return join(*args, **kwargs)

    joining.join = delayed


def blocked_by(file: str) -> None:
    """Block in a step, after its gradients are computed, while `file` exists."""
    reduce = fault_tolerant.FaultTolerantReplicas.reduce

    def blocked(*args: Any) -> None:
        while Path(file).exists():
            Path(file).with_suffix(".blocked").touch()
            time.sleep(0.02)
        reduce(*args)

    fault_tolerant.FaultTolerantReplicas.reduce = blocked  # pyright: ignore[reportAttributeAccessIssue]


def slow(seconds: str) -> None:
    """Prolong each step by this time."""
    step = trainer.train_step

    def slower(job: trainer.Job) -> trainer.StepReport:
        time.sleep(float(seconds))
        return step(job)

    trainer.train_step = slower


_FAULTS: dict[str, Callable[[str], None]] = {
    inject.__name__: inject
    for inject in (
        heal_interrupted,
        donor_killed,
        nan,
        nan_until,
        nan_once,
        killed_at,
        killed_in_save,
        killed_in_call,
        killed_during_adoption,
        wrong_cursor,
        delayed_join,
        blocked_by,
        slow,
    )
}


def _corrupt_gradients(is_affected: Callable[[int], bool]) -> None:
    """Make a gradient infinite in the first feed-forward layers of each step whose position
    `is_affected`."""
    state: list[Any] = []
    build = build_state.TrainState

    def remembered(**parts: Any) -> Any:
        state[:] = [build(**parts)]
        return state[0]

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        is_trained = isinstance(module, FeedForward) and output.requires_grad
        if is_trained and is_affected(state[0].cursor):
            output.register_hook(lambda gradient: torch.full_like(gradient, math.inf))

    build_state.TrainState = remembered  # pyright: ignore[reportAttributeAccessIssue]
    nn.modules.module.register_module_forward_hook(hook)


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for fault in os.environ.get("FAULTS", "").split():
        name, _, value = fault.partition("=")
        _FAULTS[name](value)
    exit_process(train_rank(sys.argv[1:]))
