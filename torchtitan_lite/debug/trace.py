"""One step's collectives and peaks of memory, written into the dump folder.

Everything that a step does passes through torch's dispatcher, so one dispatch mode around the whole
step sees it, whoever calls. It changes no operation. Every rank writes what it saw as JSON, and the
leader a table too. Layer: above log and mesh; `debug.communication`, `debug.memory`,
`debug.modules`, `debug.table`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_lite.debug.communication import AxisNames, Collective, name_of, size_of
from torchtitan_lite.debug.memory import ModulePeaks
from torchtitan_lite.debug.modules import ROOT, ModuleTracker
from torchtitan_lite.debug.table import folded, table
from torchtitan_lite.log import logger
from torchtitan_lite.mesh import Mesh
from torchtitan_lite.torch_compat import (
    Operations,
    entered_record_function,
    group_of,
    leaves_record_function,
)

_FSDP_COLLECTIVE = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((.+)\))?")
"""The labels under which FSDP2 communicates; the root's has no name in brackets."""


def traced_step(asked: int | None, *, resume_step: int, last_step: int) -> int:
    """The number of the step to trace: the one asked for, or the second that this run takes, or its
    only one."""
    if asked is None:
        return min(resume_step + 2, last_step)
    if asked <= resume_step:
        logger.warning(
            "Nothing will be traced: debug.trace_communication_step is %d, and this run goes on "
            "after step %d.",
            asked,
            resume_step,
        )
    return asked


class StepTrace:
    """Traces one step of a run.

    `step` is the context of each step, and `in_schedule` that of the schedule's runs, by which
    forward and backward are told from the rest of the step. `tensors` gives the state that lives
    before the step; the buffers of `parts` are added to it.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        mesh: Mesh,
        *,
        traced_step: int,
        folder: Path,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._parts = parts
        self._mesh = mesh
        self._traced_step: int | None = traced_step
        self._folder = folder
        self._tensors = tensors
        self._recorder: _Recorder | None = None

    def step(self, number: int) -> AbstractContextManager[object]:
        """The context of the step that is tried as number `number`."""
        return self._traced(number) if number == self._traced_step else nullcontext()

    def in_schedule(self) -> AbstractContextManager[object]:
        """The context of a run of the schedule."""
        return nullcontext() if self._recorder is None else self._recorder.in_schedule()

    @contextmanager
    def _traced(self, number: int) -> Iterator[None]:
        # A step that is refused is tried again under its number, but is traced once.
        self._traced_step = None
        buffers = (buffer for part in self._parts for buffer in part.buffers())
        peaks = ModulePeaks(self._mesh.device, chain(self._tensors().values(), buffers))
        tracker = ModuleTracker(self._parts)
        self._recorder = _Recorder(tracker, peaks, AxisNames(self._mesh))
        try:
            with tracker, Operations(self._recorder.run):
                yield
            self._write(number, self._recorder.collectives, peaks, tracker.names)
        finally:
            self._recorder = None

    def _write(
        self, number: int, collectives: list[Collective], peaks: ModulePeaks, names: Sequence[str]
    ) -> None:
        peaks.close()
        trace = {
            "step": number,
            "rank": self._mesh.rank,
            "mesh": dict(
                zip(
                    self._mesh.device_mesh.mesh_dim_names or (),
                    self._mesh.device_mesh.shape,
                    strict=True,
                )
            ),
            "collectives": [asdict(collective) for collective in collectives],
            "grouped": folded(collectives),
            "peak_memory_bytes": peaks.by_module(names, ROOT),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"communication_rank_{self._mesh.rank}.json"
        path.write_text(json.dumps(trace, indent=1))
        if self._mesh.is_leader:
            path = self._folder / "communication.txt"
            path.write_text(table(trace))
            logger.info(
                "Wrote what travels in step %d, and the peak memory of each module: %s",
                number,
                path,
            )


class _Recorder:
    """Runs every operation of a step, and records those that communicate."""

    def __init__(self, tracker: ModuleTracker, peaks: ModulePeaks, axes: AxisNames) -> None:
        self.collectives: list[Collective] = []
        self._tracker = tracker
        self._peaks = peaks
        self._axes = axes
        self._outside = "step"
        self._labels: list[str] = []

    @contextmanager
    def in_schedule(self) -> Iterator[None]:
        self._outside = "other"
        try:
            yield
        finally:
            self._outside = "step"

    def run(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        module, phase = self._tracker.module or ROOT, self._tracker.phase or self._outside
        self._peaks.at(module, phase)
        result = operation(*args, **kwargs)
        self._peaks.note(result)
        self._follow_labels(operation, args)
        group = group_of(operation, args, kwargs)
        if group is not None:
            num_bytes, dtype = size_of((*args, *kwargs.values()), result)
            self.collectives.append(
                Collective(
                    order=len(self.collectives),
                    operation=name_of(operation),
                    axis=self._axes.of(group, operation, phase),
                    num_bytes=num_bytes,
                    dtype=dtype,
                    module=self._served_module() or module,
                    phase=phase,
                )
            )
        return result

    def _follow_labels(self, operation: Any, args: Sequence[Any]) -> None:
        label = entered_record_function(operation, args)
        if label is not None:
            self._labels.append(label)
        elif leaves_record_function(operation):
            self._labels.pop()
            # FSDP frees and refills its weights under labels.
            self._peaks.measure_again()

    def _served_module(self) -> str | None:
        """The module that FSDP communicates for, which need not be the one at work: it gathers
        ahead, and scatters some gradients when backward is over."""
        match = _FSDP_COLLECTIVE.fullmatch(self._labels[-1]) if self._labels else None
        return None if match is None else match[1] or ROOT
