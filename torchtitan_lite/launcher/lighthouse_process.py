"""The lighthouse in a process of its own, started again on its port when it dies: the replicas
wait for it meanwhile. Layer: above processes and policy.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite.launcher.failure import failure_of
from torchtitan_lite.launcher.log_lines import LineFilter
from torchtitan_lite.launcher.policy import GiveUp, RestartPolicy
from torchtitan_lite.launcher.processes import ExitStatus, kill_session, spawn

_LISTENING = re.compile(rb"listening on .+:(\d+)")
"""The line by which a lighthouse says where it is."""
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Where replicas of this machine find one that listens everywhere."""
_READ_BYTES = 1 << 16
_FIRST_DELAY_S = 0.1


class LighthouseProcess:
    """A lighthouse that is kept up."""

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        environment: Mapping[str, str],
        *,
        host: str,
        log: Path,
        max_restarts: int,
        say: Callable[[str], None],
    ) -> None:
        """`command` gives the command line for HOST:PORT, where port 0 is one of its own choice.
        `say` tells people what happens."""
        self._command, self._environment, self._host, self._log = command, environment, host, log
        self._policy = RestartPolicy(max_restarts, first_delay_s=_FIRST_DELAY_S)
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: dict[int, LineFilter] = {}
        """By descriptor: what it prints, and its errors. Two pipes, so that no line comes into the
        middle of another."""
        self._file: BinaryIO | None = None
        self._restart_at_s: float | None = None
        self._port = 0
        self.is_listening = False
        self.num_restarts = 0
        self.given_up: GiveUp | None = None

    @property
    def address(self) -> str | None:
        """HOST:PORT; None while it has never been up."""
        host = _REACHED_AT.get(self._host, self._host)
        return f"{host}:{self._port}" if self._port else None

    @property
    def pid(self) -> int | None:
        """Of the process that was started last; None when that was waited for."""
        return None if self._process is None else self._process.pid

    @property
    def descriptors(self) -> list[int]:
        """Readable when there is something to look at."""
        return list(self._streams)

    def start(self) -> None:
        """Start it. Raises OSError."""
        self._policy.started()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._log.open("ab", buffering=0)
        ends = []
        for _ in range(2):
            descriptor, end = os.pipe()
            os.set_blocking(descriptor, False)
            self._streams[descriptor] = LineFilter()
            ends.append(end)
        try:
            command = self._command(f"{self._host}:{self._port}")
            self._process = spawn(command, self._environment, output=ends[0], errors=ends[1])
        finally:
            for end in ends:
                os.close(end)

    def look(self, now_s: float) -> None:
        """Take note of what it says, and start it again when it is time."""
        if self._restart_at_s is not None and now_s >= self._restart_at_s:
            self._restart_at_s = None
            self.num_restarts += 1
            self.start()
        if self._process is None:
            return
        has_ended = self._process.poll() is not None
        for line in self._read():
            found = _LISTENING.fullmatch(line)
            if found is not None and not self.is_listening:
                self._port = int(found[1])
                self.is_listening = True
                self._policy.worked(now_s)
                self._say(f"lighthouse: listening on {self.address}")
        if has_ended:
            self._settle(now_s)

    def kill(self) -> None:
        """End it, and wait until it has."""
        self._restart_at_s = None
        if self._process is not None:
            kill_session(self._process.pid)
            self._process.wait()
            self._close()

    def _settle(self, now_s: float) -> None:
        assert self._process is not None
        status = ExitStatus(self._process.returncode)
        self._close()
        decision = self._policy.failed(failure_of("lighthouse", status, self._log), now_s)
        if isinstance(decision, GiveUp):
            self.given_up = decision
            self._say(f"lighthouse: given up, {status}: {decision.reason}")
        else:
            self._restart_at_s = now_s + decision.delay_s
            self._say(f"lighthouse: failed, {status}; restarts in {decision.delay_s:g} s")

    def _read(self) -> list[bytes]:
        """The lines that it has said since, which are logged."""
        lines = []
        for descriptor, filter_ in list(self._streams.items()):
            try:
                while content := os.read(descriptor, _READ_BYTES):
                    lines += filter_.feed(content)
                # Else its end would be told again and again.
                os.close(descriptor)
                del self._streams[descriptor]
            except BlockingIOError:
                continue
        if lines and self._file is not None:
            self._file.write(b"\n".join(lines) + b"\n")
        return lines

    def _close(self) -> None:
        self._process, self.is_listening = None, False
        for descriptor in self._streams:
            os.close(descriptor)
        self._streams = {}
        if self._file is not None:
            self._file.close()
            self._file = None
