"""What is to be launched. Layer: above group."""

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.launcher.arguments import dump_folder
from torchtitan_lite.launcher.group import torchrun_command
from torchtitan_lite.outputs import BOOKS, LAUNCH_EVENTS, LAUNCH_LOGS, METRICS, replica_folder

_TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
"""They would make a rank of what is started below another torchrun."""
_JOIN_TIMEOUT_MS = 2000
"""Replicas of one machine come within a second or two of each other."""
_LIGHTHOUSES = {
    "builtin": "torchtitan_lite.lighthouse",
    "torchft": "torchtitan_lite.launcher.torchft_lighthouse",
}
_PROGRAM = ("-m", "torchtitan_lite", "train")
_TORCHRUN_MARGIN_S = 10
"""torchrun kills ranks that take longer to leave: later than the launcher, which says so."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `Launcher` needs to know."""

    num_replicas: int
    ranks: Sequence[int]
    """The numbers of ranks that each replica may have, ascending: it has the last of them, unless
    that many cannot be had."""
    group_command: Callable[[int, int], Sequence[str]]
    """Replica k, a number of ranks -> its command line."""
    lighthouse_command: Callable[[str], Sequence[str]]
    """The command line of a lighthouse at HOST:PORT."""
    dump_folder: Path
    log_dir: Path
    host: str = "127.0.0.1"
    max_restarts: int = 10
    """In a row, of a replica or of the lighthouse."""
    max_restart_delay_s: float = 30.0
    """Between two attempts at a replica."""
    grace_s: float = 30.0
    """For ranks that were asked to leave, and for writers that are still busy at the end."""
    slots_file: Path | None = None
    """Says for how many ranks each replica has place; see `slots`."""
    regrow_after_s: float = 600.0
    """After which a place where a rank kept dying is tried again."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    messenger_command: Callable[[str], Sequence[str]] | None = None
    """The command line of what tells the lighthouse at HOST:PORT of replicas that have failed, at
    once: it reads their names, such as "replica_00001", a line each. None: nobody tells."""

    def metrics(self, replica: int) -> Path:
        """What a replica writes of its steps."""
        return replica_folder(self.dump_folder, replica) / METRICS

    def books(self, replica: int) -> Path:
        """What its time has gone into."""
        return replica_folder(self.dump_folder, replica) / BOOKS

    def logs(self, replica: int) -> Path:
        """A folder for each attempt of a replica lies in this one."""
        return replica_folder(self.log_dir, replica)

    @property
    def events(self) -> Path:
        """File of the launcher's events."""
        return self.log_dir / LAUNCH_EVENTS

    def first_environment(self) -> dict[str, str]:
        """What all that is started has in common, but for the lighthouse's address."""
        kept = {k: v for k, v in self.environment.items() if k not in _TORCHRUN_VARIABLES}
        defaults = {
            # The processes share the cores.
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCHTITAN_LITE_TOKEN": secrets.token_hex(16),
        }
        timeout_s = int(self.grace_s) + _TORCHRUN_MARGIN_S
        return {**defaults, **kept, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(timeout_s)}


def training_plan(
    arguments: Sequence[str],
    *,
    num_replicas: int,
    ranks: Sequence[int],
    slots_file: Path | None,
    regrow_after_s: float,
    lighthouse: str,
    min_replicas: int,
    max_restarts: int,
    max_restart_delay_s: float,
    grace_s: float,
    host: str,
    log_dir: Path | None,
) -> Plan:
    """Replicas that train with `arguments`. Raises ConfigError, also if the configuration is wrong
    for one of the numbers of `ranks`."""
    folder = dump_folder(arguments)

    def of_replica(replica: int) -> list[str]:
        own = {"enable": "true", "replica_id": str(replica), "group_size": str(num_replicas)}
        added = [text for k, v in own.items() for text in (f"--fault_tolerance.{k}", v)]
        return [*arguments, *added]

    _check_ranks(ranks, of_replica(0))

    def group(replica: int, num_ranks: int) -> list[str]:
        return torchrun_command(sys.executable, num_ranks, [*_PROGRAM, *of_replica(replica)])

    def lighthouse_command(address: str) -> list[str]:
        options = ["--bind", address, "--min-replicas", str(min_replicas)]
        options += ["--join-timeout-ms", str(_JOIN_TIMEOUT_MS)]
        return [sys.executable, "-m", _LIGHTHOUSES[lighthouse], *options]

    def messenger(address: str) -> list[str]:
        return [sys.executable, "-m", "torchtitan_lite.launcher.tell_left", address]

    return Plan(
        num_replicas=num_replicas,
        ranks=ranks,
        slots_file=slots_file,
        regrow_after_s=regrow_after_s,
        group_command=group,
        lighthouse_command=lighthouse_command,
        dump_folder=folder,
        log_dir=log_dir or folder / LAUNCH_LOGS,
        host=host,
        max_restarts=max_restarts,
        max_restart_delay_s=max_restart_delay_s,
        grace_s=grace_s,
        # torchft's own lighthouse cannot be told.
        messenger_command=messenger if lighthouse == "builtin" else None,
    )


def _check_ranks(ranks: Sequence[int], arguments: Sequence[str]) -> None:
    """Check the configuration in a process that imports torch. Raises ConfigError."""
    module, numbers = "torchtitan_lite.config.other_ranks", ",".join(map(str, ranks))
    answer = subprocess.run(
        [sys.executable, "-m", module, numbers, "--", *arguments], capture_output=True, text=True
    )
    if answer.returncode:
        raise ConfigError(answer.stderr.strip() or f"{module} ended with {answer.returncode}.")
