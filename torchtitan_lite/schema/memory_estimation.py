"""The [memory_estimation] table."""

from typing import Annotated

from torchtitan_lite.schema.section import Section, only


class MemoryEstimationConfig(Section):
    """Estimate the memory of a run without running it."""

    enable: Annotated[bool, only(False, "memory estimation")] = False
    """Estimate the memory instead of training."""
    disable_fake_mode: bool = False
    """Estimate with real tensors; without effect while switched off."""
