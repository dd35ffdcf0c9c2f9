"""Process supervision on Linux: start processes that die with this one, inspect, adopt and kill
them.

Invariant: only processes started here, and their descendants, are ever signaled, by their process
id or process group.
"""

import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_STATE, _PARENT, _START = 0, 1, 19
"""Indices into /proc/PID/stat, counted from the field after the name."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded before any fork: a forked child must not wait for the lock of the dynamic loader.
_libc = ctypes.CDLL(None, use_errno=True)
WRITER_MODULE = "torchtitan_lite.checkpoint.background"
_ORPHAN_GRACE_S = 1.0


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int,
    stderr: int | None = None,
    stdin: int = subprocess.DEVNULL,
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own that dies with this one (PR_SET_PDEATHSIG). Main
    thread only, while no other thread runs. If `stderr` is omitted, standard error goes to
    `stdout`. `inherited` are further descriptors for the process. Raises OSError."""
    parent = os.getpid()

    def between_fork_and_exec() -> None:
        die_with_parent()
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(
        command,
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=stdout if stderr is None else stderr,
        start_new_session=True,
        pass_fds=inherited,
        preexec_fn=between_fork_and_exec,
    )


def die_with_parent() -> None:
    """Set PR_SET_PDEATHSIG, so that the kernel kills this process when its parent dies. Call it in
    each process, because the setting survives exec but not fork. The parent counts as dead when the
    thread that forked exits: fork from the main thread only. If the parent has died before the
    call, nothing happens: check it afterwards."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Set PR_SET_CHILD_SUBREAPER: this process adopts all descendants whose parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Subreaper:
    """Reaper of the processes that this process has adopted, which requires `become_subreaper`.

    The writer of a checkpoint outlives its trainer on purpose, until the last snapshot is durable,
    and then exits. Another orphan that does not exit within a short time is killed.
    """

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self.has_writer = False
        """Whether a checkpoint writer was among the orphans at the last call of `reap`."""

    def reap(self, own: Set[int], now_s: float) -> None:
        """Wait for orphans that have exited and kill those that outstay their time; `own` are the
        processes started by this one."""
        children = set(children_of(os.getpid())) - own
        living = {pid for pid in children if not _reap(pid)}
        writers = {pid for pid in living if is_writer(command_line(pid))}
        self.has_writer = bool(writers)
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in living}
        for pid, since_s in self._since_s.items():
            if pid not in writers and now_s - since_s >= _ORPHAN_GRACE_S:
                signal_process(pid, signal.SIGKILL)

    @property
    def num_orphans(self) -> int:
        """Number of orphans at the last call of `reap`."""
        return len(self._since_s)


def is_writer(words: list[str]) -> bool:
    """Return whether a command line is that of a checkpoint writer."""
    return ("-m", WRITER_MODULE) in pairwise(words)


@dataclass(frozen=True)
class ExitStatus:
    """Exit status of a process."""

    code: int
    """Exit status, or the negative signal number, as in subprocess."""

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


def first_failed(statuses: Iterable[tuple[int, ExitStatus]]) -> tuple[int, ExitStatus] | None:
    """Of ranks that have exited together, return the failed one to report, with its exit status;
    None if none has failed. A rank that exited with an error has the cause in its log, while one
    that was killed may have been killed because of it."""
    failed = (status for status in statuses if not status[1].is_clean)
    return min(failed, key=lambda status: (status[1].is_signal, status[0]), default=None)


def wait_readable(descriptors: Iterable[int], timeout_s: float = 0) -> set[int]:
    """Wait until a descriptor is readable or the time is up, and return those that are. A pidfd is
    readable once its process has exited."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}


def state_of(pid: int) -> str:
    """Return the state letter of a process; empty if it is gone."""
    fields = _stat_fields(pid)
    return fields[_STATE] if fields else ""


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after the boot; None if it has ended, even if
    its parent has not waited for it yet."""
    fields = _stat_fields(pid)
    return None if not fields or fields[_STATE] in ("Z", "X") else int(fields[_START])


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process is gone or its parent is in another
    namespace."""
    fields = _stat_fields(pid)
    return int(fields[_PARENT]) if fields else 0


def children_of(pid: int) -> list[int]:
    """Return the children of a process, including zombies; none if the process is gone."""
    children: list[int] = []
    # The process and its threads may exit during the loop.
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                children += map(int, text.split())
    return children


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; none if it has exited."""
    return _null_separated(pid, "cmdline")


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have exited."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_process_group(leader: int) -> None:
    """Kill a process group. Safe after its leader has exited: the kernel does not reuse its id
    while the group has members."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; none if the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The name, in parentheses, may contain any characters.
    return stat.rpartition(")")[2].split()


def _null_separated(pid: int, name: str) -> list[str]:
    try:
        content = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in content.split(b"\0") if word]


def _reap(pid: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")
