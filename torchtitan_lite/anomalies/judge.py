"""The decision about a step, by its loss, its gradient norm and the history. Layer: above config,
history and spikes."""

import math
from dataclasses import dataclass
from enum import Enum

from torchtitan_lite.anomalies.history import History
from torchtitan_lite.anomalies.spikes import deviations_above
from torchtitan_lite.schema.anomalies import AnomaliesConfig

_LEAST_OF_LOSS = 0.02
_LEAST_OF_LOG_NORM = 0.05
"""Deviations that are noise in any run: nats, and the logarithm of a norm."""


class Action(Enum):
    """What to do with a step. The values are those of the config."""

    COMMIT = "commit"
    REPEAT = "repeat"
    """Retry with the same samples: a replica was lost."""
    SKIP = "skip"
    STOP = "stop"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True)
class Verdict:
    """The decision about one step."""

    action: Action
    reason: str = ""
    """The anomaly."""

    @property
    def is_suspicious(self) -> bool:
        """Whether the step is anomalous."""
        return self.action not in (Action.COMMIT, Action.REPEAT)


REPEAT = Verdict(Action.REPEAT)


class Judge:
    """Decides about steps; equal numbers and histories give equal decisions."""

    def __init__(self, config: AnomaliesConfig, max_skipped_steps: int) -> None:
        self._config, self._max_skipped_steps = config, max_skipped_steps
        self.window = 0 if config.on_spike == "off" else config.spike_window
        """Length of the history, in steps."""
        self.roll_back_steps = config.roll_back_steps

    def judge(self, loss: float, grad_norm: float, history: History) -> Verdict:
        """Decide about a step that all ranks completed."""
        config = self._config
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._limited(config.on_non_finite, "is not finite", history)
        if config.on_spike != "off" and (reason := self._spike(loss, grad_norm, history)):
            return self._limited(config.on_spike, reason, history)
        return Verdict(Action.COMMIT)

    def _spike(self, loss: float, grad_norm: float, history: History) -> str:
        """Describe a spike; empty if there is none."""
        if len(history.losses) < self._config.spike_min_steps:
            return ""
        norms = [_log(norm) for norm in history.grad_norms]
        for name, above in (
            ("loss", deviations_above(loss, history.losses, _LEAST_OF_LOSS)),
            ("norm", deviations_above(_log(grad_norm), norms, _LEAST_OF_LOG_NORM)),
        ):
            if above > self._config.spike_factor:
                return f"spikes ({name} {above:.1f} deviations above the last {len(norms)} steps)"
        return ""

    def _limited(self, wanted: str, reason: str, history: History) -> Verdict:
        if history.refused_in_a_row + 1 >= self._max_skipped_steps and wanted != "stop":
            row = f"the last of {history.refused_in_a_row + 1} steps in a row"
            return Verdict(Action.STOP, f"{reason}, {row} (debug.max_skipped_steps)")
        if wanted == "roll_back" and history.roll_backs_in_a_row >= self._config.max_roll_backs:
            row = f"after {history.roll_backs_in_a_row} roll backs in a row"
            return Verdict(Action.STOP, f"{reason}, {row} (anomalies.max_roll_backs)")
        return Verdict(Action(wanted), reason)


def _log(norm: float) -> float:
    """A step without a gradient does not fail."""
    return math.log(max(norm, 1e-30))
