"""The processes that `torchtitan-lite train` starts: its ranks, and what they inherit."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchtitan_lite.cli.train_options import TrainOptions
from torchtitan_lite.core.log import logger
from torchtitan_lite.core.rank.processes import die_with_parent
from torchtitan_lite.core.run_lease import supervisor_environment
from torchtitan_lite.fault_tolerance.supervision.launcher.start_command import TRAIN_OPTIONS
from torchtitan_lite.fault_tolerance.supervision.local_ranks import run_ranks

_PARENT = "TORCHTITAN_LITE_PARENT_PID"
"""Environment variable: the process of --nproc; its ranks die with it."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Start the ranks, forward signals to them, and return the exit status of the first that
    failed, or 0."""
    command = [sys.executable, "-m", "torchtitan_lite", "train", *arguments]
    with received_signals() as received:
        first = run_ranks(command, num_ranks, {**os.environ, **_environment()}, received)
    if first is None:
        return 0
    rank, status = first
    if status.is_signal:
        logger.error("Rank %d was %s.", rank, status)
    elif not received:
        logger.error("Rank %d failed with %s; see above.", rank, status)
    return status.code if status.code > 0 else 1


def agent_environment(options: TrainOptions) -> dict[str, str]:
    """Return the environment variables of an agent's processes."""
    return {
        **os.environ,
        **_environment(),
        _PARENT: str(os.getpid()),
        TRAIN_OPTIONS: shlex.join(options.kept),
    }


def _environment() -> dict[str, str]:
    """Return the environment variables of all processes that this one starts."""
    # They share the cores.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {**threads, **supervisor_environment()}


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """Collect the signals that arrive until the end of the block. SIGHUP stays ignored under
    nohup; the others are requests even if a shell has started this process in the background and
    it therefore ignores SIGINT."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_nproc() -> None:
    """Kill this rank when its parent dies, so that it does not keep training unsupervised."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        die_with_parent()
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGKILL)
