"""Detection of anomalous steps, by loss, gradient norm and the steps before.

Spikes are measured in robust deviations, from the median and the median distance to it, so that one
spike does not hide the next (Hampel, "The influence curve and its role in robust estimation",
1974).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np

from torchtitan_lite.config.tables.anomalies import AnomaliesConfig

_MIN_LOSS_DEVIATION = 0.02
_MIN_LOG_NORM_DEVIATION = 0.05
"""Deviations below these are noise in any run: in nats, and of the logarithm of a norm."""
_MAX_ROLLBACKS = 64
"""Rollbacks to remember."""
_MAD_TO_SIGMA = 1.4826
"""Standard deviation per median absolute deviation, of a normal distribution."""


class StepAction(Enum):
    """Action for a step. SKIP, STOP and ROLL_BACK have the values of the config."""

    COMMIT = "commit"
    ABORT = "abort"
    """Retry with the same samples, because a rank or a replica failed."""
    SKIP = "skip"
    STOP = "stop"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True)
class Decision:
    """The decision about one step."""

    action: StepAction
    reason: str = ""
    """The anomaly."""
    faulty_ranks: tuple[int, ...] = ()
    """Ranks whose recomputation of an aborted step differed, or whose state is damaged, by index
    among all ranks of all replicas."""
    has_damaged_state: bool = False
    """Whether the state of these ranks changed in memory."""

    @property
    def is_anomalous(self) -> bool:
        """Whether the step was completed and must not be committed."""
        return self.action not in (StepAction.COMMIT, StepAction.ABORT)


ABORT = Decision(StepAction.ABORT)


@dataclass
class StepStatistics:
    """Recent losses, gradient norms and rollbacks: what the decision about a step depends on.

    Part of the training state, because a healing replica and a resumed run must decide as the
    others do.
    """

    losses: list[float] = field(default_factory=list)
    """Losses of the newest committed steps within the window, oldest first."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of the same steps."""
    consecutive_skips: int = 0
    consecutive_rollbacks: int = 0
    rolled_back_from: int = 0
    """Step at which the last rollback began; beyond it the count of rollbacks restarts."""
    rollbacks: list[list[int]] = field(default_factory=list)
    """(step, cursor) at which training continued after each rollback."""

    def record_commit(self, step: int, loss: float, grad_norm: float, *, window: int) -> None:
        """Record a committed step; `window` is the number of steps to keep."""
        self.losses = [*self.losses, loss][-window:] if window else []
        self.grad_norms = [*self.grad_norms, grad_norm][-window:] if window else []
        self.consecutive_skips = 0
        if step > self.rolled_back_from:
            self.consecutive_rollbacks = 0

    def record_skip(self) -> None:
        """Record a skipped step."""
        self.consecutive_skips += 1

    def record_rollback(self, restored: "StepStatistics", *, at: int, to: int, cursor: int) -> None:
        """Record a rollback from step `at` to step `to`, whose statistics were `restored`; the next
        sample is `cursor`."""
        self.losses, self.grad_norms = restored.losses, restored.grad_norms
        self.consecutive_rollbacks += 1
        self.rolled_back_from = max(self.rolled_back_from, at)
        self.rollbacks = [*self.rollbacks, [to, cursor]][-_MAX_ROLLBACKS:]

    def was_abandoned(self, step: int, cursor: int) -> bool:
        """Whether a rollback abandoned the state of this run at `step` and `cursor`."""
        return any(step > to and cursor <= at for to, at in self.rollbacks)

    def reset_counts(self) -> None:
        """Reset the counts of consecutive anomalies, because the run ends."""
        self.consecutive_skips = self.consecutive_rollbacks = 0

    def values(self) -> dict[str, Any]:
        """Return JSON values, which do not change later."""
        return {_SAVED_NAMES.get(name, name): value for name, value in asdict(self).items()}

    @staticmethod
    def of(values: Mapping[str, Any]) -> "StepStatistics":
        """Restore from `values`; an earlier release may have written fewer."""
        saved = {
            field.name: _SAVED_NAMES.get(field.name, field.name) for field in fields(StepStatistics)
        }
        return StepStatistics(**{name: values[key] for name, key in saved.items() if key in values})


_SAVED_NAMES = {
    "consecutive_skips": "refused_in_a_row",
    "consecutive_rollbacks": "roll_backs_in_a_row",
    "rolled_back_from": "furthest",
    "rollbacks": "returns",
}
"""Names in checkpoints, kept so that earlier ones stay readable."""


class AnomalyDetector:
    """Decides about steps; equal numbers and histories give equal decisions."""

    def __init__(self, config: AnomaliesConfig, max_skipped_steps: int) -> None:
        self._config, self._max_skipped_steps = config, max_skipped_steps
        self.window = 0 if config.on_spike == "off" else config.spike_window
        """Number of steps that the statistics cover."""
        self.roll_back_steps = config.roll_back_steps
        self.ignores_history = config.on_spike == "off"
        """Whether exactly the steps whose loss or gradient norm is not finite are anomalous."""

    def decide(self, loss: float, grad_norm: float, statistics: StepStatistics) -> Decision:
        """Decide about a step that all ranks completed."""
        config = self._config
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self._limited(config.on_non_finite, "is not finite", statistics)
        if config.on_spike != "off" and (reason := self._spike(loss, grad_norm, statistics)):
            return self._limited(config.on_spike, reason, statistics)
        return Decision(StepAction.COMMIT)

    def _spike(self, loss: float, grad_norm: float, statistics: StepStatistics) -> str:
        """Describe a spike; empty if there is none."""
        if len(statistics.losses) < self._config.spike_min_steps:
            return ""
        norms = [_log(norm) for norm in statistics.grad_norms]
        for name, above in (
            ("loss", deviations_above(loss, statistics.losses, _MIN_LOSS_DEVIATION)),
            ("norm", deviations_above(_log(grad_norm), norms, _MIN_LOG_NORM_DEVIATION)),
        ):
            if above > self._config.spike_factor:
                return f"spikes ({name} {above:.1f} deviations above the last {len(norms)} steps)"
        return ""

    def _limited(self, action: str, reason: str, statistics: StepStatistics) -> Decision:
        """Return the configured action, or STOP beyond a limit of consecutive anomalies."""
        if statistics.consecutive_skips + 1 >= self._max_skipped_steps and action != "stop":
            row = f"the last of {statistics.consecutive_skips + 1} consecutive steps"
            return Decision(StepAction.STOP, f"{reason}, {row} (debug.max_skipped_steps)")
        num_rollbacks = statistics.consecutive_rollbacks
        if action == "roll_back" and num_rollbacks >= self._config.max_roll_backs:
            row = f"after {num_rollbacks} consecutive rollbacks"
            return Decision(StepAction.STOP, f"{reason}, {row} (anomalies.max_roll_backs)")
        return Decision(StepAction(action), reason)


def _log(norm: float) -> float:
    """Return the logarithm, also for a step without a gradient."""
    return math.log(max(norm, 1e-30))


def deviations_above(value: float, history: Sequence[float], min_deviation: float) -> float:
    """Return how many robust standard deviations `value` is above the median of `history`. A
    deviation counts as at least `min_deviation`: otherwise any change of nearly constant values
    would be a spike."""
    median, deviation = median_and_deviation(np.array(history))
    return (value - float(median)) / max(float(deviation), min_deviation)


def median_and_deviation(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the median over the first dim, and a robust estimate of the standard deviation."""
    median = np.median(values, axis=0)
    distance = np.median(np.abs(values - median), axis=0)
    return median, _MAD_TO_SIGMA * distance
