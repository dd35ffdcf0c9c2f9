"""What a rank does at its very start when the launcher has started it. Layer: above parent_death.

Importing this takes milliseconds: until `obey_launcher` has run, nothing would end the rank with
its torchrun.
"""

import faulthandler
import os
import signal
from pathlib import Path

from torchtitan_lite.launcher.parent_death import die_with_parent, parent_of
from torchtitan_lite.log import logger
from torchtitan_lite.outputs import STARTING

LAUNCHER_PID = "TORCHTITAN_LITE_LAUNCHER_PID"
"""Environment variable: the launcher's process. Its children are the torchruns."""
RANK_LOGS = "TORCHTITAN_LITE_RANK_LOGS"
"""Environment variable: the folder into which each rank writes its output."""

ATTEMPT = "TORCHTITAN_LITE_ATTEMPT"
"""Environment variable: how often the launcher has started this replica before."""

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank print the Python stacks of all its threads, if it can."""
FLIGHT_SIGNAL = signal.SIGUSR2
"""Makes a rank write its flight recorder, if it can: a thread waits for it. See
`replica.flight_recorder`."""


def announce(stage: str) -> None:
    """Report what a starting rank does next, for the launcher's table; without one, nothing."""
    if RANK_LOGS in os.environ:
        logger.info("%s%s", STARTING, stage)


def is_restarted() -> bool:
    """Whether the launcher has started this replica before, in this run."""
    return os.environ.get(ATTEMPT, "0") != "0"


def rank_log(folder: Path, rank: int) -> Path:
    """The file that holds all that a rank prints."""
    return folder / f"rank_{rank}.log"


def obey_launcher() -> None:
    """Die with torchrun, and print into a file of this rank's own. Without a launcher: nothing."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    die_with_parent()
    if parent_of(os.getppid()) != int(launcher):
        # torchrun died before the wish was made: whoever adopts this process is no torchrun.
        os.kill(os.getpid(), signal.SIGKILL)
    # A file, and no pipe: what the rank or its writer prints never waits for the launcher.
    path = rank_log(Path(os.environ[RANK_LOGS]), int(os.environ["RANK"]))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    # Before there are other threads: to one that does not block it, it would be the end.
    signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})
