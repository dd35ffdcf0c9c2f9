"""The process that tells the lighthouse which replicas have left. Layer: above processes.

It runs all the time, so that the word is there in milliseconds; and it is a process, since the
client's threads and the launcher's forks do not go together.
"""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.launcher.processes import kill_session, spawn


class Messenger:
    """A messenger that is started when it is first needed, and again when it has died."""

    def __init__(
        self, command: Callable[[str], Sequence[str]], environment: Mapping[str, str], log: Path
    ) -> None:
        """`command` gives the command line for the lighthouse at HOST:PORT. What it has to complain
        of goes to `log`."""
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[bytes] | None = None
        self._input = -1

    @property
    def pid(self) -> int | None:
        """Of the process that was started last."""
        return None if self._process is None else self._process.pid

    def start(self, address: str) -> None:
        """Let it wait for names. Raises OSError."""
        self.kill()
        end, self._input = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._process = spawn(
                    self._command(address), self._environment, output=log.fileno(), source=end
                )
        finally:
            os.close(end)

    def tell(self, address: str, name: str) -> None:
        """Tell the lighthouse at `address` that the replica `name` has left. Raises OSError."""
        if self._process is None or self._process.poll() is not None:
            self.start(address)
        os.write(self._input, name.encode() + b"\n")

    def kill(self) -> None:
        """End it, and wait until it has."""
        if self._process is not None:
            kill_session(self._process.pid)
            self._process.wait()
            self._process = None
        if self._input >= 0:
            with suppress(OSError):
                os.close(self._input)
            self._input = -1
