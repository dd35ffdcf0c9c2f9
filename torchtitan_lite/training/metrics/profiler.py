"""Profiler traces and memory snapshots.

Cycles are aligned to the step number, not to the start of the process: with `profile_freq = 10` a
trace ends at steps 10, 20, 30 also after a resume at step 7. If everything is disabled, each call
does nothing.
"""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch

from torchtitan_lite.config.tables.profiling import ProfilingConfig
from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_files import OutputFaults
from torchtitan_lite.distributed.torch_compat import (
    dump_cuda_memory_snapshot,
    record_cuda_memory_history,
)

_SNAPSHOT_MAX_ENTRIES = 100_000
"""Maximum number of allocations and frees in a snapshot."""


class StepProfiler:
    """Profiles steps inside its `with` block; call `step(number)` at the end of each.

    Writes `folder/SAVE_TRACES_FOLDER/iteration_N/rankR_trace.json`, and snapshots likewise. If the
    block ends during a recording, or with an out-of-memory error of the GPU, the partial recording
    is written to `iteration_N_exit`. `device_kind` is "cpu" or "cuda"; `faults` records failures of
    the disk. Raises UserError if memory
    snapshots are requested on a CPU.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        *,
        folder: Path,
        rank: int,
        resume_step: int,
        device_kind: str,
        faults: OutputFaults | None = None,
    ) -> None:
        self._faults = faults or OutputFaults()
        if config.enable_memory_snapshot and device_kind != "cuda":
            raise UserError(
                "[profiling] enable_memory_snapshot = true needs a GPU: it records the allocator "
                f"of CUDA, and this run computes on {device_kind}. Set it to false, or run on a "
                "GPU."
            )
        self._config = config
        self._traces = folder / config.save_traces_folder
        self._snapshots = folder / config.save_memory_snapshot_folder
        self._rank = rank
        self._step = resume_step
        self._suffix = ""
        self._profile = self._make_profile(device_kind) if config.enable_profiling else None

    def step(self, step: int) -> None:
        """Notify the profiler of the end of step `step`."""
        self._step = step
        if self._profile is not None:
            with warnings.catch_warnings():
                # torch warns that a cycle discards the previous one, which is already written.
                warnings.filterwarnings("ignore", "Warning: Profiler clears events")
                self._profile.step()
        if self._config.enable_memory_snapshot and step % self._config.profile_freq == 0:
            self._write_snapshot()

    def __enter__(self) -> Self:
        if self._config.enable_memory_snapshot:
            record_cuda_memory_history(_SNAPSHOT_MAX_ENTRIES)
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, _: object, raised: BaseException | None, __: object) -> None:
        self._suffix = "_exit"
        if self._profile is not None:
            self._profile.stop()
        if self._config.enable_memory_snapshot:
            if isinstance(raised, torch.OutOfMemoryError):
                self._write_snapshot()
            record_cuda_memory_history(None)

    def _make_profile(self, device_kind: str) -> torch.profiler.profile:
        config = self._config
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device_kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(
            skip_first=-self._step % config.profile_freq,
            wait=config.profile_freq - config.profiler_warmup - config.profiler_active,
            warmup=config.profiler_warmup,
            active=config.profiler_active,
        )
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._write_trace,
            record_shapes=True,
        )

    def _write_trace(self, profile: torch.profiler.profile) -> None:
        self._write(
            "trace", self._traces, f"rank{self._rank}_trace.json", profile.export_chrome_trace
        )

    def _write_snapshot(self) -> None:
        name = f"rank{self._rank}_memory_snapshot.pickle"
        self._write("memory snapshot", self._snapshots, name, dump_cuda_memory_snapshot)

    def _write(self, what: str, folder: Path, name: str, write: Callable[[str], object]) -> None:
        path = folder / f"iteration_{self._step}{self._suffix}" / name
        start_s = time.perf_counter()
        with self._faults.tolerating(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
            logger.info(f"Wrote the {what} {path} in {time.perf_counter() - start_s:.1f} s.")
