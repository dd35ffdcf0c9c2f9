"""The [memory_estimation] table."""

from typing import Annotated

from torchtitan_lite.config.tables.section import Section, only


class MemoryEstimationConfig(Section):
    """Estimate a run without running it."""

    enable: bool = False
    """Print what `torchtitan-lite estimate` prints, for the number of processes that were started,
    instead of training."""
    disable_fake_mode: Annotated[bool, only(False, "an estimate with real tensors")] = False
    """Estimate with real tensors; a run with `debug.trace_communication` measures them."""
