"""The [anomalies] table."""

from typing import Annotated, Literal

from torchtitan_lite.config.tables.section import Section, above, at_least


class AnomaliesConfig(Section):
    """What to do with anomalous steps (not in torchtitan). Their samples are not used again in any
    case."""

    on_non_finite: Literal["skip", "stop", "roll_back"] = "skip"
    """For a loss or gradient that is not finite. "skip": the step changes nothing but the position
    in the data. "stop": the last good state is saved, and the run ends with an error. "roll_back":
    the state returns to an earlier one, and training continues with later samples."""
    on_spike: Literal["off", "skip", "stop", "roll_back"] = "off"
    """The same for a loss or a gradient norm far above those before it; "off": no spike detection.
    What a spike is depends on the run, and gradients are clipped anyway."""
    spike_window: Annotated[int, at_least(8)] = 128
    """Committed steps to compare with."""
    spike_min_steps: Annotated[int, at_least(8)] = 64
    """Minimum steps in the window for spike detection."""
    spike_factor: Annotated[float, above(0)] = 10.0
    """Threshold of a spike above the median of the window, in robust standard deviations (1.4826
    times the median absolute deviation) of the loss or of the logarithm of the norm."""
    roll_back_steps: Annotated[int, at_least(1)] = 1
    """Minimum age, in steps, of the state that a rollback restores. After the next anomaly it goes
    further back. Snapshots in memory hold the last few steps, checkpoints others."""
    max_roll_backs: Annotated[int, at_least(1)] = 3
    """Consecutive rollbacks without new progress, after which the run ends."""
