"""The ranks of one machine, all of which end when one fails."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_lite.core.addresses import loopback_address
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.machine import memory_bytes
from torchtitan_lite.core.rank.processes import (
    ExitStatus,
    first_failed,
    kill_process_group,
    signal_process,
    spawn,
    wait_readable,
)
from torchtitan_lite.core.rank.supervised import STORE_LISTENER, rank_environment

_PROCESS_BYTES = 147 << 20
"""Memory that a process with torch shares with no other, before it has a model."""
_POLL_S = 0.1
_LEAVE_S = 30.0
"""Time for the other ranks to leave after one has failed; then they are killed."""


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    descriptor: int
    """pidfd, readable once the process has exited."""


def check_process_count(number: int, options: str) -> None:
    """Raise ConfigError if this machine has too little memory for `number` processes without any
    weights; `options` of the command line require them."""
    memory = memory_bytes()
    if number > memory // _PROCESS_BYTES:
        raise ConfigError(
            f"{options} need {number:,} processes on this machine, and its {memory / 1e9:.0f} GB "
            f"of memory hold at most {memory // _PROCESS_BYTES:,} without a model. Lower them."
        )


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    environment: Mapping[str, str],
    requests: Sequence[int],
) -> tuple[int, ExitStatus] | None:
    """Run `command` as each rank, in a session of its own, until all have exited; `requests`
    receives the numbers of signals to forward.

    Returns the rank that failed first, and its exit status; None if all have succeeded. Main thread
    only, while no other thread runs. Raises OSError.
    """
    running = _start(command, num_ranks, environment)
    first: tuple[int, ExitStatus] | None = None
    num_forwarded, kill_at_s = 0, float("inf")
    while running:
        for number in requests[num_forwarded:]:
            num_forwarded += 1
            for rank in running:
                signal_process(rank.process.pid, forwarded_signal(number))
        statuses = []
        ended = wait_readable((rank.descriptor for rank in running), _POLL_S)
        for rank in [rank for rank in running if rank.descriptor in ended]:
            running.remove(rank)
            os.close(rank.descriptor)
            statuses.append((rank.number, ExitStatus(rank.process.wait())))
        if first is None and (first := first_failed(statuses)) is not None:
            kill_at_s = time.monotonic() + _LEAVE_S
            for rank in running:
                signal_process(rank.process.pid, signal.SIGTERM)
        if time.monotonic() >= kill_at_s:
            for rank in running:
                kill_process_group(rank.process.pid)
    return first


def forwarded_signal(number: int) -> signal.Signals:
    """Return the signal to forward: a closed terminal (SIGHUP) is a request to save and exit,
    too."""
    return signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)


def _start(command: Sequence[str], num_ranks: int, environment: Mapping[str, str]) -> list[_Rank]:
    """Start the ranks. Rank 0 inherits the listening socket of the store by which they find each
    other, so that no other process can take its port."""
    address = loopback_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        started = []
        for number in range(num_ranks):
            own = rank_environment(
                rank=number,
                local_rank=number,
                machine=0,
                num_ranks=num_ranks,
                num_local_ranks=num_ranks,
                store=(address, listener.getsockname()[1]),
                generation=0,
            )
            if number == 0:
                own[STORE_LISTENER] = str(listener.fileno())
            process = spawn(
                command,
                {**environment, **own},
                stdout=1,
                stderr=2,
                inherited=[listener.fileno()] if number == 0 else [],
            )
            started.append(_Rank(number, process, os.pidfd_open(process.pid)))
    return started
