"""Trace of the collectives and memory peaks of one step, written to the dump folder.

Every operation of a step passes through torch's dispatcher, so one dispatch mode around the step
sees all of them, and changes none. Every rank writes its trace as JSON, and the leader a table,
too.
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

from torchtitan_lite.core.log import logger, warn_on_rank_0
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.distributed.mesh import Mesh
from torchtitan_lite.distributed.torch_compat import (
    Operations,
    RecordedLabels,
    group_of,
)
from torchtitan_lite.training.debug.communication import AxisNames, Collective, name_of, size_of
from torchtitan_lite.training.debug.memory import ModulePeaks
from torchtitan_lite.training.debug.modules import ROOT, ModuleTracker
from torchtitan_lite.training.debug.table import folded, trace_table

_FSDP_COLLECTIVE = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((.+)\))?")
"""Labels of FSDP2's communication; the root's label has no name in brackets."""


def traced_step(asked: int | None, *, resume_step: int, last_step: int) -> int:
    """Return the number of the step to trace: the configured one, or the second step of this
    process, or its only one."""
    if asked is None:
        return min(resume_step + 2, last_step)
    if asked <= resume_step:
        warn_on_rank_0(
            "Nothing will be traced: debug.trace_communication_step is %d, and this run starts "
            "after step %d.",
            asked,
            resume_step,
        )
    return asked


class StepTracer:
    """Traces one step of a run.

    `step` is the context of each step, and `in_schedule` that of the schedule's runs, which
    distinguishes forward and backward from the rest of the step. `tensors` returns the state that
    is live before the step; the buffers of `parts` are added to it.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        mesh: Mesh,
        *,
        traced_step: int,
        folder: Path,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        faults: OutputFaults | None = None,
    ) -> None:
        self._faults = faults or OutputFaults()
        self._parts = parts
        self._mesh = mesh
        self._traced_step: int | None = traced_step
        self._folder = folder
        self._tensors = tensors
        self._recorder: _Recorder | None = None

    def step(self, number: int) -> AbstractContextManager[object]:
        """Return the context of the attempted step `number`."""
        return self._traced(number) if number == self._traced_step else nullcontext()

    def in_schedule(self) -> AbstractContextManager[object]:
        """Return the context of a run of the schedule."""
        return nullcontext() if self._recorder is None else self._recorder.in_schedule()

    @contextmanager
    def _traced(self, number: int) -> Iterator[None]:
        # A skipped step is followed by one with the same number; only the first is traced.
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
        with self._faults.tolerating("communication trace"):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"communication_rank_{self._mesh.rank}.json"
            path.write_text(json.dumps(trace, indent=1))
            if self._mesh.is_leader:
                path = self._folder / "communication.txt"
                path.write_text(trace_table(trace))
                logger.info(
                    "Wrote what travels in step %d, and the peak memory of each module: %s",
                    number,
                    path,
                )


class _Recorder:
    """Runs every operation of a step, and records collectives."""

    def __init__(self, tracker: ModuleTracker, peaks: ModulePeaks, axes: AxisNames) -> None:
        self.collectives: list[Collective] = []
        self._tracker = tracker
        self._peaks = peaks
        self._axes = axes
        self._outside = "step"
        self._labels = RecordedLabels()

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
        if self._labels.follow(operation, args):
            # FSDP frees and refills its parameters under labels.
            self._peaks.measure_again()
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

    def _served_module(self) -> str | None:
        """Return the module that FSDP communicates for. It may differ from the running one, because
        FSDP prefetches, and reduces some gradients after backward."""
        match = _FSDP_COLLECTIVE.fullmatch(self._labels[-1]) if self._labels else None
        return None if match is None else match[1] or ROOT
