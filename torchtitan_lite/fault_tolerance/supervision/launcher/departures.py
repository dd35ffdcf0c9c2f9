"""Departures of replicas, as reported to the lighthouse: the launcher's side, and the process that
sends them.

`python -m torchtitan_lite.fault_tolerance.supervision.launcher.departures HOST:PORT` reads the
names of replicas and the times of their failures (time.monotonic()) from standard input, one per
line. It runs for the whole run, so that a departure arrives within milliseconds. The scripts of
deploy/ start one for each departure, write the name only, and restart the replica after it ended.
TORCHTITAN_LITE_TOKEN authenticates it.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.core.errors import UserError
from torchtitan_lite.core.rank.processes import ExitStatus, kill_process_group, spawn
from torchtitan_lite.fault_tolerance.supervision.logs import open_log
from torchtitan_lite.fault_tolerance.supervision.restart_policy import (
    GiveUp,
    RestartPolicy,
    failure_of,
)

_TIMEOUT_S = 1.0
"""Age at which a departure is dropped. A replica needs longer to join again."""


class DepartureNotifier:
    """Process that sends departures, started on first use and restarted after it died."""

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        environment: Mapping[str, str],
        log: Path,
        *,
        max_restarts: int,
    ) -> None:
        """`command` returns the command line for the lighthouse at HOST:PORT. Its errors go to
        `log`. It is started again after at most `max_restarts` consecutive failures, and then only
        for the next departure."""
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[bytes] | None = None
        self._input = -1
        self._policy, self._restart_at_s = RestartPolicy(max_restarts), math.inf

    @property
    def pid(self) -> int | None:
        """Process id of the last process started."""
        return None if self._process is None else self._process.pid

    def start(self, address: str) -> None:
        """Start the process. Raises OSError."""
        self.kill()
        self._policy.started()
        end, self._input = os.pipe()
        try:
            with open_log(self._log) as log:
                self._process = spawn(
                    self._command(address), self._environment, stdout=log.fileno(), stdin=end
                )
        finally:
            os.close(end)

    def notify(self, address: str, name: str) -> None:
        """Notify the lighthouse at `address` that the replica `name` has left. Raises OSError."""
        if self._process is None or self._process.poll() is not None:
            self.start(address)
        os.write(self._input, f"{name} {time.monotonic()}\n".encode())

    def poll(self, address: str, now_s: float) -> str | None:
        """Start the process again when its delay is over. Return how it ended by itself and what
        follows, for display, once; None otherwise."""
        if now_s >= self._restart_at_s:
            self._restart_at_s = math.inf
            with suppress(OSError):
                # Otherwise the next departure starts it.
                self.start(address)
        if self._process is None:
            return None
        if (code := self._process.poll()) is None:
            self._policy.made_progress(now_s)
            return None
        self.kill()
        status = ExitStatus(code)
        failure = failure_of("departure notifier", status, self._log)
        decision = self._policy.failed(failure, now_s)
        if isinstance(decision, GiveUp):
            return f"{status}: {decision.reason}; the next departure starts it again"
        self._restart_at_s = now_s + decision.delay_s
        return f"{status}; it restarts in {decision.delay_s:g} s"

    def kill(self) -> None:
        """Kill the process and wait for it."""
        self._restart_at_s = math.inf
        if self._process is not None:
            kill_process_group(self._process.pid)
            self._process.wait()
            self._process = None
        if self._input >= 0:
            with suppress(OSError):
                os.close(self._input)
            self._input = -1


def main(address: str) -> int:
    """Send a departure for each line of standard input, and return the exit status."""
    # Imported here because the launcher imports this module, and does not call.
    from torchtitan_lite.distributed.rpc.authentication import TOKEN
    from torchtitan_lite.fault_tolerance.lighthouse.client import notify_left

    token = os.environ.get(TOKEN, "")
    for line in sys.stdin:
        name, *sent = line.split()
        age_s = time.monotonic() - float(sent[0]) if sent else 0.0
        # Later, a new process of the replica may have joined, and must not be removed.
        left_s = _TIMEOUT_S - age_s
        if left_s <= 0:
            continue
        try:
            notify_left(address, name, token, left_s)
        except UserError as error:
            # Otherwise the lighthouse detects the missing heartbeats, a few seconds later.
            print(error, file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
