"""Processes: started so that they die with this one, watched, and ended. Layer: above
parent_death.

Invariant: only processes that were started here, or descend from one, are ever signalled, by their
number or that of their process group.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.launcher.parent_death import die_with_parent

_STATE, _EXIT_CODE = 0, 49
"""Places in /proc/PID/stat, counted after the name."""


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int,
    errors: int | None = None,
    source: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own that dies with this one. Main thread only, and no
    other thread may run. `source`, `output` and `errors` are its standard streams; without
    `errors` both go to `output`. Raises OSError."""
    parent = os.getpid()

    def between_fork_and_exec() -> None:
        die_with_parent()
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(
        command,
        env=environment,
        stdin=source,
        stdout=output,
        stderr=output if errors is None else errors,
        start_new_session=True,
        preexec_fn=between_fork_and_exec,
    )


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended."""

    code: int
    """As subprocess gives it: the exit status, or minus the number of the signal."""

    @property
    def is_clean(self) -> bool:
        return self.code == 0

    @property
    def is_signal(self) -> bool:
        return self.code < 0

    def __str__(self) -> str:
        if self.is_signal:
            with suppress(ValueError):
                return f"killed by {signal.Signals(-self.code).name}"
            return f"killed by signal {-self.code}"
        return f"exit status {self.code}"


def children_of(pid: int) -> list[int]:
    """Children of a process, those that have ended and were not waited for included; none when the
    process is gone."""
    found: list[int] = []
    # A process goes, and a thread too, while this looks.
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                found += map(int, text.split())
    return found


def command_line(pid: int) -> list[str]:
    """The arguments of a process; none when it is gone or has ended."""
    return _words(pid, "cmdline")


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it is gone or has ended."""
    parts = (word.partition("=") for word in _words(pid, "environ"))
    return {name: value for name, _, value in parts}


def ended_with(pid: int) -> ExitStatus | None:
    """How a process ended that its parent has not waited for yet; None when it still runs, or is
    gone altogether."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[_STATE] != "Z":
        return None
    return ExitStatus(os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])))


def state_of(pid: int) -> str:
    """The state of a process as the kernel's letter; empty when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[_STATE]


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_session(leader: int) -> None:
    """Kill a process that leads a process group, and all of that group. Also when the leader has
    ended: the kernel gives its number to nobody while the group has members."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _words(pid: int, name: str) -> list[str]:
    try:
        content = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in content.split(b"\0") if word]
