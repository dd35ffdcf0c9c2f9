"""Finds a replica that hangs, has it looked into, and says why it is to be ended. One for each
attempt. Layer: above diagnosis and group."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torchtitan_lite.launcher.diagnosis import REPORT, TIMEOUT_S, first_line, request
from torchtitan_lite.launcher.failure import Failure
from torchtitan_lite.launcher.group import Group
from torchtitan_lite.launcher.hang import Lateness, rank_in, reason
from torchtitan_lite.launcher.processes import kill_session, spawn
from torchtitan_lite.launcher.pulse import Pulse


class HangWatch:
    """Looks at the ranks of one attempt."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lateness = Lateness()
        self._diagnosis: subprocess.Popen[bytes] | None = None
        self._pulses: list[Pulse | None] = []
        """Of the ranks that were late when the diagnosis began."""
        self._late: set[int] = set()
        self._until_s = 0.0

    @property
    def pid(self) -> int | None:
        """Of the diagnosis that runs."""
        return None if self._diagnosis is None else self._diagnosis.pid

    def look(self, now_s: float) -> Failure | None:
        """Look again; why the attempt has to be ended, if so."""
        if self._diagnosis is not None:
            if self._diagnosis.poll() is None and now_s < self._until_s:
                return None
            self.close()
            return self._verdict(now_s)
        ranks = self._group.seen()
        self._late = self._lateness.look(ranks, now_s)
        if self._late:
            self._pulses = self._late_pulses()
            self._until_s = now_s + TIMEOUT_S
            try:
                self._begin(request(ranks, self._late, self._group.pid))
            except OSError:
                # Neither a full disk nor a lack of processes may save it, nor end the others.
                return self._verdict(now_s)
        return None

    def close(self) -> None:
        """End a diagnosis that is no longer wanted."""
        if self._diagnosis is not None:
            kill_session(self._diagnosis.pid)
            self._diagnosis.wait()
            self._diagnosis = None

    def _verdict(self, now_s: float) -> Failure | None:
        if self._late_pulses() != self._pulses:
            # They went on: it was slow, and did not hang.
            return None
        folder = self._group.folder
        told = first_line(folder)
        what = told or reason(self._group.seen(), self._late, {}, now_s)
        # It tells nothing of the attempt itself: the next may well work.
        return Failure(what, "", folder / REPORT, rank_in(what))

    def _late_pulses(self) -> list[Pulse | None]:
        return [one.pulse for one in self._group.seen() if one.number in self._late]

    def _begin(self, told: bytes) -> None:
        command = [sys.executable, "-m", "torchtitan_lite.launcher.diagnosis"]
        folder: Path = self._group.folder
        (folder / REPORT).unlink(missing_ok=True)
        # A file, not a pipe: nobody has to be there to read it.
        with tempfile.TemporaryFile() as source, (folder / "diagnosis.log").open("ab") as log:
            source.write(told)
            source.seek(0)
            self._diagnosis = spawn(
                [*command, str(folder)],
                _without_secrets(self._group.environment),
                output=log.fileno(),
                source=source.fileno(),
            )


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """What a program that only looks has no need of is not given to it."""
    return {name: value for name, value in environment.items() if not name.endswith("_TOKEN")}
