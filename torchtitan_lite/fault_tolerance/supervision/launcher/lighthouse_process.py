"""Lighthouse in a subprocess, restarted on its port when it dies; meanwhile the replicas wait for
it."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torchtitan_lite.core.diagnosis import LIGHTHOUSE, Cause, Diagnosis
from torchtitan_lite.core.rank.processes import ExitStatus, kill_process_group, spawn
from torchtitan_lite.fault_tolerance.supervision.logs import TorchftLogFilter, open_log
from torchtitan_lite.fault_tolerance.supervision.restart_policy import (
    GiveUp,
    RestartPolicy,
    failure_of,
)

_LISTENING = re.compile(rb"listening on .+:(\d+)")
"""Line that a lighthouse prints once it listens."""
_LOCAL_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses at which replicas on this machine reach a lighthouse that listens on all interfaces."""
_READ_BYTES = 1 << 16
_FIRST_DELAY_S = 0.1
_START_AGAIN_S = 1.0
"""Delay after it could not be started again, for lack of descriptors, processes or memory."""


class LighthouseProcess:
    """Lighthouse that is restarted when it dies."""

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        environment: Mapping[str, str],
        *,
        host: str,
        log: Path,
        max_restarts: int,
        report_event: Callable[[str], None],
        report_diagnosis: Callable[[Diagnosis], None],
    ) -> None:
        """`command` returns the command line for HOST:PORT; with port 0 the lighthouse chooses one.
        `report_event` reports events to the user, `report_diagnosis` that the lighthouse died."""
        self._command, self._environment, self._host, self._log = command, environment, host, log
        self._policy = RestartPolicy(max_restarts, first_delay_s=_FIRST_DELAY_S)
        self._report_event, self._report_diagnosis = report_event, report_diagnosis
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: dict[int, TorchftLogFilter] = {}
        """Standard output and standard error, by descriptor. Two pipes, so that lines of one never
        interleave with lines of the other."""
        self._file: BinaryIO | None = None
        self._restart_at_s: float | None = None
        self._is_delayed = False
        """Whether the last restart was not possible."""
        self._port = 0
        self.is_listening = False
        self.num_restarts = 0
        self.given_up: GiveUp | None = None

    @property
    def address(self) -> str | None:
        """HOST:PORT; None until it has listened once."""
        host = _LOCAL_ADDRESS.get(self._host, self._host)
        return f"{host}:{self._port}" if self._port else None

    @property
    def state(self) -> str:
        """State for display; "down" until a lighthouse that has failed starts again."""
        if self.given_up is not None:
            return "given up"
        if self.is_listening:
            return "listening"
        if self._process is not None:
            return "starting"
        if self._restart_at_s is not None:
            return "down"
        return "stopped" if self._port else "waiting"

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        return None if self._process is None else self._process.pid

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that are readable when `poll` has work to do."""
        return list(self._streams)

    def start(self) -> None:
        """Start the lighthouse. Raises OSError."""
        self._policy.started()
        self._file = open_log(self._log)
        ends = []
        for _ in range(2):
            descriptor, end = os.pipe()
            os.set_blocking(descriptor, False)
            self._streams[descriptor] = TorchftLogFilter()
            ends.append(end)
        try:
            command = self._command(f"{self._host}:{self._port}")
            self._process = spawn(command, self._environment, stdout=ends[0], stderr=ends[1])
        finally:
            for end in ends:
                os.close(end)

    def poll(self, now_s: float) -> None:
        """Read its output, and restart it when its delay is over."""
        if self._restart_at_s is not None and now_s >= self._restart_at_s:
            self._start_again(now_s)
        if self._process is None:
            return
        has_ended = self._process.poll() is not None
        for line in self._read():
            match = _LISTENING.fullmatch(line)
            if match is not None and not self.is_listening:
                self._port = int(match[1])
                self.is_listening = True
                self._policy.made_progress(now_s)
                self._report_event(f"lighthouse: listening on {self.address}")
        if has_ended:
            self._handle_exit(now_s)

    def kill(self) -> None:
        """Kill the lighthouse and wait for it."""
        self._restart_at_s = None
        if self._process is not None:
            kill_process_group(self._process.pid)
            self._process.wait()
            self._close()

    def _start_again(self, now_s: float) -> None:
        """Start it again, or later if that is not possible now: the replicas wait for it."""
        try:
            self.start()
        except OSError as error:
            self._close()
            if not self._is_delayed:
                self._report_event(f"lighthouse: cannot be started: {error}; it is tried again")
            self._restart_at_s, self._is_delayed = now_s + _START_AGAIN_S, True
        else:
            self._restart_at_s, self._is_delayed = None, False
            self.num_restarts += 1

    def _handle_exit(self, now_s: float) -> None:
        assert self._process is not None
        status = ExitStatus(self._process.returncode)
        self._close()
        text = f"{status}, log in {self._log}"
        self._report_diagnosis(Diagnosis(cause=Cause.PROCESS_DIED, text=text, process=LIGHTHOUSE))
        decision = self._policy.failed(failure_of("lighthouse", status, self._log), now_s)
        if isinstance(decision, GiveUp):
            self.given_up = decision
            self._report_event(f"lighthouse: given up, {status}: {decision.reason}")
        else:
            self._restart_at_s = now_s + decision.delay_s
            self._report_event(f"lighthouse: failed, {status}; restarts in {decision.delay_s:g} s")

    def _read(self) -> list[bytes]:
        """Log and return the lines printed since the last call."""
        lines = []
        for descriptor, filter_ in list(self._streams.items()):
            try:
                while content := os.read(descriptor, _READ_BYTES):
                    lines += filter_.feed(content)
                # A descriptor at its end would be readable forever.
                os.close(descriptor)
                del self._streams[descriptor]
            except BlockingIOError:
                continue
        if lines and self._file is not None:
            with suppress(OSError):
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
