"""The [anomalies] table."""

from typing import Annotated, Literal

from torchtitan_lite.schema.section import Section, above, at_least


class AnomaliesConfig(Section):
    """What is done with a step whose numbers are not to be trusted (not in torchtitan). Its samples
    are not used again, whatever is done."""

    on_non_finite: Literal["skip", "stop", "roll_back"] = "skip"
    """With a loss or gradient that is not finite. "skip": the step is refused, and nothing changes
    but the place in the data. "stop": the last good state is saved, and the run ends with an error.
    "roll_back": the state returns to an earlier one, and training goes on with later samples."""
    on_spike: Literal["off", "skip", "stop", "roll_back"] = "off"
    """The same with a loss or a norm of the gradient far above those before it; "off": nothing is
    taken for a spike. What a spike is differs from run to run, and gradients are clipped anyway."""
    spike_window: Annotated[int, at_least(8)] = 128
    """Committed steps that a step is compared with."""
    spike_min_steps: Annotated[int, at_least(8)] = 64
    """With fewer in the window nothing is taken for a spike."""
    spike_factor: Annotated[float, above(0)] = 10.0
    """A spike is further above the median of the window than this many robust standard deviations
    (1.4826 times the median of the distances from it), of the loss or of the logarithm of the
    norm."""
    roll_back_steps: Annotated[int, at_least(1)] = 1
    """A roll back leads to the newest state that is at least so many steps old. After the next bad
    step it leads further back. Snapshots in memory hold the last few steps, checkpoints others."""
    max_roll_backs: Annotated[int, at_least(1)] = 3
    """Roll backs in a row, without coming further than before, after which the run ends."""
