"""The score of a fault, from the diagnoses that the product has written. No knowledge of the
injector but the expected answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torchtitan_lite.core.diagnosis import LAUNCHER_FILE, RANK, Cause
from torchtitan_lite.core.outputs import LAUNCH_LOGS
from torchtitan_lite.fault_tolerance.supervision.logs import records


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer that a fault must get."""

    causes: tuple[Cause, ...]
    replica: int | None
    rank: int | None
    process: str = RANK
    either_end: bool = False
    """Whether a process at the other end of a link is right too, because a link between two ranks
    alone has no culprit."""


class Verdict(Enum):
    """Score of one fault. The values are displayed."""

    RIGHT = "right"
    WRONG_RANK = "wrong rank"
    WRONG_CAUSE = "wrong cause"
    SILENT = "silent"


def judge(answer: Answer, said: Sequence[dict[str, Any]]) -> Verdict:
    """Score the diagnoses after a fault, in the order of their times. One that names another
    process is wrong, whatever else was said, and the first must have the right cause."""
    if not said:
        return Verdict.SILENT
    if not all(_names(one, answer) for one in said):
        return Verdict.WRONG_RANK
    causes = {cause.value for cause in answer.causes}
    return Verdict.RIGHT if said[0]["cause"] in causes else Verdict.WRONG_CAUSE


def _names(said: dict[str, Any], answer: Answer) -> bool:
    process = [answer.replica, answer.rank]
    if answer.either_end and process in said["peers"]:
        return True
    return process == [said["replica"], said["rank"]] and said["process"] == answer.process


class DiagnosisReader:
    """Reader of the diagnoses that a run has written since the last call of `read`."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the `job.dump_folder` of the run."""
        self._folder = folder
        self._places: dict[Path, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return new diagnoses, the oldest first."""
        files = [self._folder / LAUNCH_LOGS / LAUNCHER_FILE]
        files += self._folder.glob("replica_*/diagnoses_rank_*.jsonl")
        found = [record for path in files for record in records(self._new_lines(path))]
        return sorted(found, key=lambda record: record["time"])

    def _new_lines(self, path: Path) -> list[bytes]:
        if not path.exists():
            return []
        content = path.read_bytes()[self._places.get(path, 0) :]
        complete = content[: content.rfind(b"\n") + 1]
        self._places[path] = self._places.get(path, 0) + len(complete)
        return complete.splitlines()
