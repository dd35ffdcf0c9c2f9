"""The [profiling] table. Names and meanings are those of torchtitan 0.2.2."""

from typing import Annotated, Self

from pydantic import model_validator

from torchtitan_lite.config.tables.section import Section, at_least


class ProfilingConfig(Section):
    """Traces of time and snapshots of memory."""

    enable_profiling: bool = False
    """Record traces with torch.profiler; Perfetto or chrome://tracing opens them."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, below `job.dump_folder`."""
    profile_freq: Annotated[int, at_least(1)] = 10
    """Length of a cycle in steps: each cycle waits, warms up, then records. Memory snapshots are
    written at the end of each cycle too."""
    profiler_active: Annotated[int, at_least(1)] = 1
    """Steps recorded at the end of each cycle."""
    profiler_warmup: Annotated[int, at_least(0)] = 3
    """Steps before the recorded ones in which the profiler runs and discards its events, because
    its start distorts the first ones."""
    enable_memory_snapshot: bool = False
    """Record every allocation on the GPU and write snapshots for pytorch.org/memory_viz."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the memory snapshots, below `job.dump_folder`."""

    @model_validator(mode="after")
    def _cycle_fits(self) -> Self:
        needed = self.profiler_warmup + self.profiler_active
        if needed > self.profile_freq:
            raise ValueError(
                f"profiler_warmup ({self.profiler_warmup}) + profiler_active "
                f"({self.profiler_active}) = {needed} steps do not fit in a cycle of profile_freq "
                f"({self.profile_freq}); set profile_freq to at least {needed}"
            )
        return self
