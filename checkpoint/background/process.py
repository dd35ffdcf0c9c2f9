"""The trainer's handles of its background processes.

Invariant: only `close` waits for a process. A dead process is a state, not an error: `alive` is
False, and `start` starts a new one.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.background.channel import WriterSettings
from torchtitan_lite.checkpoint.background.save import SINGLE_REPLICA, WriterGroup
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.output_fence import withholds_outputs

_MODULE = "torchtitan_lite.checkpoint.background"
_READ_BYTES = 1 << 16
_POLL_S = 0.01


class BackgroundProcess:
    """Process that serves one rank: JSON orders in, JSON responses out."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any]) -> None:
        """`settings` is its first order."""
        self._command, self._settings = list(command), dict(settings)
        self._process: subprocess.Popen[bytes] | None = None
        self._inherited: tuple[int, ...] = ()
        """Descriptors that the process inherits."""
        self._partial = b""
        self._warned_of_noise = False
        self._unsent: deque[bytes] = deque()

    def start(self) -> None:
        """Start the process, or replace a dead one. Raises OSError."""
        self._reap()
        # A new session, so that signals to the trainer's process group do not reach the process.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=self._inherited,
            env=_environment(),
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._partial = b""
        self._unsent.clear()
        self._send(self._settings)

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Id of the process that was started last."""
        return None if self._process is None else self._process.pid

    def responses(self) -> list[dict[str, Any]]:
        """Return the new responses without blocking."""
        if self._process is None or self._process.stdout is None:
            return []
        self._flush_unsent()
        content = b""
        with suppress(BlockingIOError, ValueError):
            while more := os.read(self._process.stdout.fileno(), _READ_BYTES):
                content += more
        *lines, self._partial = (self._partial + content).split(b"\n")
        return [response for line in lines if line and (response := self._parse(line))]

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        """Parse a response; None for output of other code in the process."""
        with suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):
                return message
        if not self._warned_of_noise:
            self._warned_of_noise = True
            logger.warning("A checkpoint process printed %r, which is not a response.", line[:200])
        return None

    def wait_for(self, key: str, timeout_s: float) -> list[dict[str, Any]]:
        """Return all responses up to the first with `key`, or until the timeout or the process's
        death."""
        deadline, responses = time.monotonic() + timeout_s, []
        while True:
            was_alive = self.alive
            responses += self.responses()
            over = not was_alive or time.monotonic() >= deadline
            if over or any(key in response for response in responses):
                return responses
            time.sleep(_POLL_S)

    def close(self, *, free: bool = False, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Let the process finish, and return its last responses. `free` removes what it holds in
        shared memory. A process that exceeds the timeout is killed."""
        if self._process is None:
            return []
        self._send({"stop": True, "free": free})
        deadline, responses = time.monotonic() + timeout_s, []
        while self.alive and time.monotonic() < deadline:
            responses += self.responses()
            time.sleep(_POLL_S)
        if self.alive:
            self._process.kill()
        self._process.wait()
        responses += self.responses()
        self._reap()
        self._release()
        return responses

    def detach(self) -> None:
        """Leave the process to finish and exit on its own, as after a trainer's death."""
        self._reap()
        with warnings.catch_warnings():
            # The process keeps running on purpose.
            warnings.simplefilter("ignore", ResourceWarning)
            self._process = None
        self._release()

    def _release(self) -> None:
        """Close what the process inherits."""
        for descriptor in self._inherited:
            with suppress(OSError):
                os.close(descriptor)

    def _send(self, order: dict[str, Any]) -> bool:
        self._unsent.append(json.dumps(order).encode() + b"\n")
        self._flush_unsent()
        return self.alive

    def _flush_unsent(self) -> None:
        """Write what the pipe accepts; the rest is sent later, and training does not wait."""
        if self._process is None or self._process.stdin is None:
            return
        try:
            while self._unsent:
                written = os.write(self._process.stdin.fileno(), self._unsent[0])
                if written < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][written:]
                    return
                self._unsent.popleft()
        except BlockingIOError:
            return
        except (BrokenPipeError, ValueError):
            # A process that cannot be started again would gather orders without end.
            self._unsent.clear()

    def _reap(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            if self._process.poll() is None:
                # Without its pipe the process finishes and exits; the lock delays its successor.
                return
            self._process = None


class WriterProcess(BackgroundProcess):
    """Writer process of one rank. Its responses: {"ready": pid}, or, with the attempt's token in
    "token", {"written": step, "seconds": number, "bytes": number}, {"committed": step},
    {"abandoned": step} or {"failed": step, "error": text}."""

    def __init__(
        self, region: Path, settings: WriterSettings, command: Sequence[str] | None = None
    ) -> None:
        """`command` replaces the interpreter's command line, up to the region's path."""
        signals_read, self.signals_fd = os.pipe()
        """Write end of a pipe that forwards the trainer's signals to the writer."""
        super().__init__(
            [*(command or (sys.executable, "-m", _MODULE)), str(region)],
            replace(settings, signals_fd=signals_read).to_json(),
        )
        self._inherited = (signals_read,)
        os.set_blocking(self.signals_fd, False)
        self._is_withheld = False
        """Whether it waits until outputs are allowed."""

    def start(self) -> None:
        self._is_withheld = withholds_outputs()
        super().start()

    def responses(self) -> list[dict[str, Any]]:
        if self._is_withheld and not withholds_outputs():
            self._is_withheld = False
            self._send({"outputs": True})
        return super().responses()

    def save(
        self,
        slot: int,
        step: int,
        token: str | None = None,
        *,
        urgent: bool = False,
        writer_group: WriterGroup = SINGLE_REPLICA,
    ) -> bool:
        """Order a save of `slot`, which is complete with `step`. `token` identifies the attempt and
        is equal on all ranks of the group; None for the first attempt of a single replica. `urgent`
        lifts all rate limits, because training waits. Returns False if the writer is dead."""
        order: dict[str, Any] = {"slot": slot, "step": step, "urgent": urgent}
        order |= {"token": token, "writer_group": writer_group.to_json()}
        return self._send({"save": order})

    def set_writer_group(self, writer_group: WriterGroup) -> bool:
        """Set the group whose fencing token applies to what is written without an order. Returns
        False if the writer is dead."""
        return self._send({"writer_group": writer_group.to_json()})

    def abandon(self, step: int) -> bool:
        """Order to abandon a save. Returns False if the writer is dead."""
        return self._send({"abandon": step})

    def _release(self) -> None:
        super()._release()
        with suppress(OSError):
            os.close(self.signals_fd)


def _environment() -> dict[str, str]:
    """Return the environment: the writer imports the same package as this process."""
    top = str(Path(__file__).absolute().parents[3])
    paths = [top, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
