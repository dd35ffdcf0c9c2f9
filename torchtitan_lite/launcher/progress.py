"""How far a replica is, read from the files that it writes. Layer: above tail.

Invariant: what an earlier attempt has written is not taken for progress of this one. The trainer
may replace `metrics.jsonl` at its start, by a copy without the steps that it will take again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.launcher.tail import Tail, is_step
from torchtitan_lite.outputs import RECEIVES_STATE, TAKES_PART


class Progress:
    """Of one attempt, from its start on."""

    def __init__(self, metrics: Path, leader_log: Path) -> None:
        """Begin with what is written from now on: `metrics` is the metrics.jsonl of the replica,
        `leader_log` what its rank 0 prints."""
        self._metrics, self._log = Tail(metrics), Tail(leader_log)
        self.is_healing = False
        """Whether the state of another replica is being received."""
        self.record: Mapping[str, Any] | None = None
        """The newest step that this attempt has taken."""

    def look(self) -> None:
        """Read what was written since."""
        for line in self._log.lines():
            if RECEIVES_STATE.encode() in line:
                self.is_healing = True
            elif TAKES_PART.encode() in line:
                self.is_healing = False
        for record in filter(is_step, self._metrics.records()):
            self.record, self.is_healing = record, False
