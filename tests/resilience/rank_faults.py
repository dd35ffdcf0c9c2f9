"""Faults in a rank of `torchtitan-lite train`, which the variable RANK_FAULTS names; a module for
`experimental.custom_import`.

`RANK_FAULTS="slow=0.1 raises=1:5"`: each step takes 0.1 s longer, and rank 1 raises an exception
after step 5 and each later one. `computes=0:5`: rank 0 computes without end after step 5, until
it is interrupted. `not_on=3`: worlds of 3 ranks raise an exception at their first step;
`stuck_on=3`: they wait there without end. `killed_in_export=1`: in the first attempt, rank 1 is
killed before it completes its second file of the last export. `late_end=2`: ranks end their
training 2 s after its last save.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.convert.hugging_face.partial_folder import PartialFolder
from torchtitan_lite.core.registry import register_hook
from torchtitan_lite.training.hooks import HookContext
from torchtitan_lite.training.train_state import TrainState
from torchtitan_lite.training.trainer import Hook, StepReport

_FAULTS = dict(fault.split("=") for fault in os.environ.get("RANK_FAULTS", "").split())


_write, _save = PartialFolder.writing, CheckpointManager.final_save
_after_step = CheckpointManager.after_step
_OF_HOOK = {"raises", "not_on", "stuck_on", "computes"}


class InjectedError(Exception):
    """The exception of `raises`."""


def faults(context: HookContext) -> Hook:
    """Return the hook with the faults of this rank."""

    def hook(state: TrainState, report: StepReport) -> None:
        rank, first = map(int, _FAULTS.get("raises", "-1:0").split(":"))
        if rank == context.mesh.rank and report.number >= first:
            raise InjectedError(f"after step {report.number}")
        if _FAULTS.get("not_on") == str(context.mesh.world_size):
            raise InjectedError(f"on {context.mesh.world_size} ranks")
        while _FAULTS.get("stuck_on") == str(context.mesh.world_size):
            time.sleep(0.1)
        if _FAULTS.get("computes") == f"{context.mesh.rank}:{report.number}":
            _FAULTS.clear()
            while True:
                sum(range(1000))

    return hook


@contextmanager
def _killed(self: PartialFolder, file: str) -> Iterator[Path]:
    with _write(self, file) as path:
        yield path
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and os.environ["RANK"] == _FAULTS["killed_in_export"]:
            _files.append(file)
            if len(_files) == 2:
                os.kill(os.getpid(), signal.SIGKILL)


def _save_and_wait(self: CheckpointManager, *, finished: bool) -> str | None:
    folder = _save(self, finished=finished)
    time.sleep(float(_FAULTS["late_end"]))
    return folder


def _slow_after_step(self: CheckpointManager) -> float:
    time.sleep(float(_FAULTS["slow"]))
    return _after_step(self)


_files: list[str] = []
if _OF_HOOK & _FAULTS.keys():
    # A run with a hook withholds more than its outputs, see `core.output_fence`.
    register_hook(faults)
if "slow" in _FAULTS:
    CheckpointManager.after_step = _slow_after_step
if "killed_in_export" in _FAULTS:
    PartialFolder.writing = _killed
if "late_end" in _FAULTS:
    CheckpointManager.final_save = _save_and_wait
