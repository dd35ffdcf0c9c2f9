"""What the replicas of a disturbed run have told of their steps. Layer: above launcher.

Invariant: every line is kept that was ever written, also where a file is replaced later: a step
that was taken twice must have had the same loss twice.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.launcher.logs import Tail, is_step
from torchtitan_lite.outputs import METRICS, replica_folder

_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class ToldStep:
    """A committed step, as one replica has told of it."""

    replica: int
    step: int
    loss: float
    num_target_tokens: int
    num_replicas: int


class Follower:
    """Reads along in a thread of its own, since faults may keep who strikes waiting."""

    def __init__(self, folder: Path, num_replicas: int) -> None:
        """`folder` is the job.dump_folder of the run. A context manager."""
        self._tails = [
            Tail(replica_folder(folder, number) / METRICS) for number in range(num_replicas)
        ]
        self.told: list[ToldStep] = []
        self.failed_steps = [0] * num_replicas
        """That had to be repeated, by replica."""
        self.newest: list[ToldStep | None] = [None] * num_replicas
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower")

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    @property
    def last_step(self) -> int:
        """The highest of all."""
        return max((one.step for one in self.newest if one is not None), default=0)

    def _follow(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        for replica, tail in enumerate(self._tails):
            records = list(tail.records())
            failed = [one for one in records if one.get("event") == "step_failed"]
            self.failed_steps[replica] += len(failed)
            for step in committed_steps(replica, records):
                self.told.append(step)
                self.newest[replica] = step


def committed_steps(replica: int, records: Iterable[dict[str, Any]]) -> Iterator[ToldStep]:
    """Those that the lines of its metrics.jsonl tell of."""
    names = ("step", "loss", "num_target_tokens", "num_replicas")
    for record in records:
        if is_step(record) and not record["skipped"]:
            yield ToldStep(replica=replica, **{name: record[name] for name in names})
