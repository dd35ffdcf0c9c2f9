"""The rank's side of the launcher: environment variables, signals, and the setup at the start of a
rank.

Importing this module takes milliseconds: until `attach_to_launcher` has run, the rank would outlive
its parent.
"""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from torchtitan_lite.core.log import logger
from torchtitan_lite.core.outputs import STARTING
from torchtitan_lite.core.rank.processes import command_line, die_with_parent

LAUNCHER_PID = "TORCHTITAN_LITE_LAUNCHER_PID"
"""Environment variable: the launcher's process id. The launcher is the parent of the ranks."""
RANK_LOGS = "TORCHTITAN_LITE_RANK_LOGS"
"""Environment variable: the folder into which each rank writes its output."""

STORE_LISTENER = "TORCHTITAN_LITE_STORE_LISTENER"
"""Environment variable of rank 0: an inherited socket, at which the store of the ranks listens."""

GENERATION = "TORCHTITAN_LITE_GENERATION"
"""Environment variable: a number that is 0 in the first generation of a replica since its launch,
and not in later ones."""
GENERATION_STARTED = "TORCHTITAN_LITE_GENERATION_STARTED"
"""Environment variable: when a generation in a process of an earlier one started, by
time.monotonic(), which has one origin for all processes of a machine."""

RANK_CHANNEL = "TORCHTITAN_LITE_RANK_CHANNEL"
"""Environment variable: the descriptor of a process's channel to the agent that gives it a rank."""
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable: the URL of the lighthouse of the replicas."""

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank print the Python stacks of all its threads (faulthandler)."""
FLIGHT_SIGNAL = signal.SIGUSR2
"""Makes a rank write its flight record; a thread waits for it. See `replica.hang_handling`."""


def rank_environment(
    *,
    rank: int,
    local_rank: int,
    machine: int,
    num_ranks: int,
    num_local_ranks: int,
    store: tuple[str, int],
    generation: int,
) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank. `store` is the address of a
    store that exists already, in which each generation has a prefix of its own."""
    host, port = store
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(machine),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_local_ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(generation),
    }


def announce(stage: str) -> None:
    """Report the stage of a starting rank for the launcher's table. Does nothing without a
    launcher."""
    if RANK_LOGS in os.environ:
        logger.info("%s%s", STARTING, stage)


def is_restarted() -> bool:
    """Return whether the launcher has started this replica before, in this run."""
    return os.environ.get(GENERATION, "0") != "0"


def generation_age_s() -> float | None:
    """Return the seconds since the start of this generation, if the process is older than that."""
    started = os.environ.get(GENERATION_STARTED)
    return None if started is None else time.monotonic() - float(started)


def rank_log(folder: Path, rank: int) -> Path:
    """Return the file that holds the output of a rank."""
    return folder / f"rank_{rank}.log"


def attach_to_launcher() -> None:
    """Die with the launcher, or with torchrun."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        _die_with_torchrun()
        return
    die_with_parent()
    if os.getppid() != int(launcher):
        # The launcher died before PR_SET_PDEATHSIG was set.
        os.kill(os.getpid(), signal.SIGKILL)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    # Done before other threads exist: in a thread that does not block it, the signal would kill the
    # process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})


def print_into_rank_log() -> None:
    """Send the output of this process to the file of its rank, if there is a launcher. A process of
    an agent calls it when it receives its rank."""
    logs = os.environ.get(RANK_LOGS)
    if logs is None:
        return
    # A file rather than a pipe, so that the rank and its writer never block on the launcher.
    path = rank_log(Path(logs), int(os.environ["RANK"]))
    # Without it (a full disk), the output stays where it went before.
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)


_ADOPTED_WITHIN_S = 2.0
"""Time in which the children of a dying process get another parent."""
_RUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable that a torchrun sets for its ranks."""
_TORCHRUN = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})


def _die_with_torchrun() -> None:
    """Die with a torchrun that a user or a scheduler started, because a rank that outlives it would
    take part in the next run.

    Other parents have no effect: a shell between torchrun and the rank may exit before the rank,
    and an agent in another program may fork its ranks from a thread that ends before them.
    """
    if "RANK" not in os.environ or _RUN_ID not in os.environ:
        return
    parent = os.getppid()
    command = command_line(parent)
    if not any(map(names_torchrun, command)):
        # Adopted by init: torchrun has died already. In a container, process 1 may be a Python
        # program with an agent of its own.
        is_adopted = parent == 1 and not any("python" in word for word in command[:1])
        if is_adopted or (not command and _dies(parent)):
            os.kill(os.getpid(), signal.SIGKILL)
        return
    die_with_parent()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def names_torchrun(word: str) -> bool:
    """Whether a word of a command line is torchrun's program or module."""
    return os.path.basename(word) in _TORCHRUN


def _dies(parent: int) -> bool:
    """Return whether the parent, which has no command line, is a dying process.

    The kernel frees the memory of such a process, and with it the command line, before its children
    get another parent. The command line of another user's process may also be hidden.
    """
    deadline_s = time.monotonic() + _ADOPTED_WITHIN_S
    while os.getppid() == parent and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return os.getppid() != parent
