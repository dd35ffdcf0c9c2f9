"""The trainer's handle of its writer process. Layer: above settings.

Invariant: nothing here waits for the writer but `close`, and a writer that died is no error but a
state: `alive` is False, and `start` starts another.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.background.coworkers import ALONE, Coworkers
from torchtitan_lite.checkpoint.background.settings import WriterSettings
from torchtitan_lite.log import logger

_MODULE = "torchtitan_lite.checkpoint.background"
_READ_BYTES = 1 << 16
_POLL_S = 0.01


class WriterProcess:
    """One rank's writer, started once for a run."""

    def __init__(
        self, region: Path, settings: WriterSettings, command: Sequence[str] | None = None
    ) -> None:
        """`command` replaces the interpreter's command line, up to the region's path."""
        self._region, self._settings = region, settings
        self._command = list(command or (sys.executable, "-m", _MODULE))
        self._process: subprocess.Popen[bytes] | None = None
        self._signals_read, self.signals_fd = os.pipe()
        """What is written to the second tells the writer of the trainer's signals."""
        os.set_blocking(self.signals_fd, False)
        self._partial = b""
        self._heard_noise = False
        self._unsent: deque[bytes] = deque()

    def start(self) -> None:
        """Start the process, or another in place of one that died. Raises OSError."""
        self._reap()
        # A session of its own: signals to the trainer's process group do not reach it.
        self._process = subprocess.Popen(
            [*self._command, str(self._region)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(self._signals_read,),
            env=_environment(),
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._partial = b""
        self._unsent.clear()
        self._send(replace(self._settings, signals_fd=self._signals_read).to_json())

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the process that was started last."""
        return None if self._process is None else self._process.pid

    def save(
        self,
        slot: int,
        step: int,
        token: str | None = None,
        *,
        hurries: bool = False,
        coworkers: Coworkers = ALONE,
    ) -> bool:
        """Order `slot`, complete with `step`, to be saved. `token` tells a new try of the same
        step from one that failed, and is the same on all ranks that write with each other; None:
        the first try of one that writes alone. `hurries`: nothing is spared any more, since
        training waits. False when the writer is dead."""
        order: dict[str, Any] = {"slot": slot, "step": step, "hurries": hurries}
        order |= {"token": token, "coworkers": coworkers.to_json()}
        return self._send({"save": order})

    def abandon(self, step: int) -> bool:
        """Order a save to be given up. False when the writer is dead."""
        return self._send({"abandon": step})

    def responses(self) -> list[dict[str, Any]]:
        """What the writer has said since, without waiting: {"ready": pid}, or, with the token
        of the attempt in "token", {"written": step}, {"committed": step}, {"abandoned": step} or
        {"failed": step, "error": text} each."""
        if self._process is None or self._process.stdout is None:
            return []
        self._flush_unsent()
        content = b""
        with suppress(BlockingIOError, ValueError):
            while more := os.read(self._process.stdout.fileno(), _READ_BYTES):
                content += more
        *lines, self._partial = (self._partial + content).split(b"\n")
        return [said for line in lines if line and (said := self._understood(line))]

    def _understood(self, line: bytes) -> dict[str, Any] | None:
        """None for what is no response: something else in the process printed it."""
        with suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                return said
        if not self._heard_noise:
            self._heard_noise = True
            logger.warning("The checkpoint writer printed %r, which is no response.", line[:200])
        return None

    def wait_for(self, key: str, timeout_s: float) -> list[dict[str, Any]]:
        """All responses up to the first that has `key`; also when the time is up or the writer
        died before it came."""
        deadline, heard = time.monotonic() + timeout_s, []
        while True:
            was_alive = self.alive
            heard += self.responses()
            over = not was_alive or time.monotonic() >= deadline
            if over or any(key in response for response in heard):
                return heard
            time.sleep(_POLL_S)

    def close(self, *, free: bool = False, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Let the writer finish what is under way, and return what it said last. `free` removes
        the region, since the run has ended well. A writer that does not end in time is killed."""
        if self._process is None:
            return []
        self._send({"stop": True, "free": free})
        deadline, heard = time.monotonic() + timeout_s, []
        while self.alive and time.monotonic() < deadline:
            heard += self.responses()
            time.sleep(_POLL_S)
        if self.alive:
            self._process.kill()
        self._process.wait()
        heard += self.responses()
        self._reap()
        self._close_signals()
        return heard

    def detach(self) -> None:
        """Leave the writer to itself, as a trainer that dies does: it flushes and ends."""
        self._reap()
        with warnings.catch_warnings():
            # That it still runs is what is wanted.
            warnings.simplefilter("ignore", ResourceWarning)
            self._process = None
        self._close_signals()

    def _send(self, order: dict[str, Any]) -> bool:
        self._unsent.append(json.dumps(order).encode() + b"\n")
        self._flush_unsent()
        return self.alive

    def _flush_unsent(self) -> None:
        """Write what the pipe takes: a busy writer reads later, and training does not wait."""
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
            self._unsent.clear()

    def _close_signals(self) -> None:
        for descriptor in (self._signals_read, self.signals_fd):
            with suppress(OSError):
                os.close(descriptor)

    def _reap(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            if self._process.poll() is None:
                # Without its pipe it flushes and ends; the lock keeps the next one waiting.
                return
            self._process = None


def _environment() -> dict[str, str]:
    """The writer finds the package where this process did, and starts no threads of its own."""
    top = str(Path(__file__).absolute().parents[3])
    paths = [top, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
