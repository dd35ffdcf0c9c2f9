"""How far a replica is, read from the files that it writes. Layer: above tail.

Invariant: what an earlier attempt has written is not taken for progress of this one. The trainer
may replace `metrics.jsonl` at its start, by a copy without the steps that it will take again.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.durations import recent_steps, time_left_s
from torchtitan_lite.launcher.tail import Tail, is_step
from torchtitan_lite.outputs import RECEIVES_STATE, STARTING, TAKES_PART

_LONGEST_STAGE = 40


class Progress:
    """Of one attempt, from its start on."""

    def __init__(self, metrics: Path, leader_log: Path) -> None:
        """Begin with what is written from now on: `metrics` is the metrics.jsonl of the replica,
        `leader_log` what its rank 0 prints."""
        self._metrics, self._log = Tail(metrics), Tail(leader_log)
        self.is_healing = False
        """Whether the state of another replica is being received."""
        self.stage = "importing torch"
        """What the leader does before its first step."""
        self.record: Mapping[str, Any] | None = None
        """The newest step that this attempt has taken."""
        self.total_steps: int | None = None
        """Number of the last step, once it is known."""
        self._recent_step_s = recent_steps()

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the last step has ended, as far as that can be estimated."""
        step = None if self.record is None else self.record.get("step")
        if self.total_steps is None or not isinstance(step, int):
            return None
        return time_left_s(self._recent_step_s, max(0, self.total_steps - step))

    def look(self) -> None:
        """Read what was written since."""
        for line in self._log.lines():
            if RECEIVES_STATE.encode() in line:
                self.is_healing = True
            elif TAKES_PART.encode() in line:
                self.is_healing = False
            elif (place := line.find(STARTING.encode())) >= 0:
                stage = line[place + len(STARTING) :].decode(errors="replace").strip()
                self.stage = "".join(filter(str.isprintable, stage))[:_LONGEST_STAGE]
        for record in self._metrics.records():
            if is_step(record):
                self.record, self.is_healing = record, False
                taken_s = record.get("step_time_s")
                if isinstance(taken_s, float) and math.isfinite(taken_s):
                    self._recent_step_s.append(taken_s)
            elif record.get("event") == "start" and isinstance(record.get("steps"), int):
                self.total_steps = record["steps"]
