"""Plan of a launch, from the options of `torchtitan-lite launch` and the arguments of `train`."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import tomli

from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.outputs import (
    GOODPUT_FILE,
    LAUNCH_EVENTS,
    LAUNCH_LOGS,
    METRICS,
    replica_folder,
)
from torchtitan_lite.distributed.rpc.authentication import TOKEN
from torchtitan_lite.fault_tolerance.supervision.agent.rank_process import rank_command
from torchtitan_lite.fault_tolerance.supervision.launcher.start_command import replica_arguments
from torchtitan_lite.fault_tolerance.supervision.resize_request import RunMesh

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
"""Variables that would make the processes of replicas ranks of an enclosing torchrun."""
_JOIN_TIMEOUT_MS = 2000
"""Replicas on one machine join within a second or two of each other."""
_LIGHTHOUSES = {
    "builtin": ("torchtitan_lite", "coordinator"),
    "torchft": ("torchtitan_lite.fault_tolerance.supervision.launcher.torchft_lighthouse",),
}
"""Modules, with the command of the first."""
_DEFAULT_DUMP_FOLDER = "./outputs"
_OF_TRAIN = (
    *("--nproc", "--nproc_per_node", "--replicas", "--spares"),
    *("--nnodes", "--rdzv_endpoint", "--rdzv_id"),
)
"""Options of `train`, as `_options` returns them, that contradict those of the launcher."""
_OF_THE_LAUNCHER = ("enable", "no_enable", "replica_id", "group_size", "lighthouse")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything that a `Launcher` starts, and its limits."""

    num_replicas: int
    ranks: Sequence[int]
    """Allowed numbers of ranks per replica, ascending. A replica gets the largest that is
    available."""
    process_command: Callable[[int], Sequence[str]]
    """Maps a replica to the command line of a process that serves its member, see
    `agent.worker`."""
    resize_refusal: str = ""
    """Why replicas cannot change their number of ranks in their processes; empty if they can."""
    check_command: Callable[[RunMesh], Sequence[str]] = lambda mesh: ("echo", '{"refusal": ""}')
    """Maps a mesh to the command line that says whether replicas can move to it in their processes,
    see `cli.resize_check`."""
    lighthouse_command: Callable[[str], Sequence[str]]
    """Maps HOST:PORT to the command line of a lighthouse."""
    dump_folder: Path
    waits_for_folder: bool = False
    """Whether the launch waits while another run uses the folder; else it is refused."""
    log_dir: Path
    is_pipelined: Callable[[RunMesh], bool] = lambda mesh: False
    """Returns whether a mesh has several pipeline stages, so that ranks send unequally much."""
    host: str = "127.0.0.1"
    max_restarts: int = 10
    """Maximum number of consecutive restarts of a replica or of the lighthouse."""
    max_restart_delay_s: float = 30.0
    """Maximum delay between two generations of a replica."""
    grace_s: float = 30.0
    """Time for ranks to leave after a stop request, and for writers that are still busy at the
    end."""
    slots_file: Path | None = None
    """File with the number of ranks available to each replica; see `resize.SlotsFile`."""
    regrow_after_s: float = 600.0
    """Delay before a slot whose rank kept dying is tried again."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    uses_gpus: bool = True
    """Whether replicas train on GPUs where there are some."""
    num_spares: int = 0
    """Spare processes per replica."""
    notifier_command: Callable[[str], Sequence[str]] | None = None
    """Maps HOST:PORT to the command line of a process that notifies the lighthouse of failed
    replicas: each line is a name, such as "replica_00001", and when it failed (time.monotonic()).
    None disables it."""

    def metrics_file(self, replica: int) -> Path:
        """Return the metrics.jsonl of a replica."""
        return replica_folder(self.dump_folder, replica) / METRICS

    def goodput_file(self, replica: int) -> Path:
        """Return the file with a replica's goodput."""
        return replica_folder(self.dump_folder, replica) / GOODPUT_FILE

    def log_folder(self, replica: int) -> Path:
        """Return the folder that holds a log folder per generation of a replica."""
        return replica_folder(self.log_dir, replica)

    def devices_of(self, replica: int) -> dict[str, str]:
        """Return the environment variables with which a replica sees its own GPUs: an equal part of
        those of this machine, in order; none without GPUs. Raises ConfigError if there are fewer
        GPUs than ranks."""
        devices = visible_gpus(self.environment)
        if not devices or not self.uses_gpus:
            return {}
        per_replica = max(self.ranks)
        needed = self.num_replicas * per_replica
        if len(devices) < needed:
            raise ConfigError(
                f"{self.num_replicas} replicas of {per_replica} ranks need {needed} GPUs, but this "
                f"machine has {len(devices)}. Start fewer replicas or ranks, or set "
                "--job.device=cpu."
            )
        own = devices[replica * per_replica : (replica + 1) * per_replica]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}

    @property
    def events_file(self) -> Path:
        """File of the launcher's events."""
        return self.log_dir / LAUNCH_EVENTS

    def base_environment(self) -> dict[str, str]:
        """Return the environment of all processes, except for the lighthouse's address."""
        kept = {k: v for k, v in self.environment.items() if k not in _TORCHRUN_VARIABLES}
        defaults = {
            # The processes share the cores.
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            TOKEN: secrets.token_hex(16),
        }
        return {**defaults, **kept}


def training_plan(
    arguments: Sequence[str],
    *,
    num_replicas: int,
    ranks: Sequence[int],
    num_spares: int,
    slots_file: Path | None,
    regrow_after_s: float,
    lighthouse: str,
    min_replicas: int,
    max_restarts: int,
    max_restart_delay_s: float,
    grace_s: float,
    host: str,
    log_dir: Path | None,
    check: Callable[[Sequence[int], Sequence[str]], str],
) -> LaunchPlan:
    """Plan the launch of replicas that train with `arguments`. `check` gets `ranks` and the
    arguments of a replica, raises ConfigError if the configuration is invalid for one of the
    numbers, and returns why replicas cannot change between them in their processes. Raises
    ConfigError."""
    folder = dump_folder(arguments)
    device = _setting(arguments, "job", "device")

    def of_replica(replica: int) -> list[str]:
        added = replica_arguments(replica, num_replicas)
        if lighthouse == "torchft":
            added += ["--fault_tolerance.lighthouse", "torchft"]
        return [*arguments, *added]

    refusal = check(ranks, of_replica(0))

    def check_command(mesh: RunMesh) -> list[str]:
        module = "torchtitan_lite.cli.resize_check"
        return [sys.executable, "-m", module, mesh.to_text(), "--", *of_replica(0)]

    section, key = "parallelism", "pipeline_parallel_degree"
    stages = _setting(arguments, section, key)

    def is_pipelined(mesh: RunMesh) -> bool:
        options = _options(mesh.arguments)
        changed = [value for option, value in options if option == f"--{section}.{key}"]
        return (changed[-1] if changed else stages) not in (None, "1")

    def lighthouse_command(address: str) -> list[str]:
        options = ["--bind", address, "--min-replicas", str(min_replicas)]
        options += ["--join-timeout-ms", str(_JOIN_TIMEOUT_MS)]
        return [sys.executable, "-m", *_LIGHTHOUSES[lighthouse], *options]

    def notifier_command(address: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "torchtitan_lite.fault_tolerance.supervision.launcher.departures",
            address,
        ]

    plan = LaunchPlan(
        num_replicas=num_replicas,
        ranks=ranks,
        num_spares=num_spares,
        uses_gpus=device != "cpu",
        slots_file=slots_file,
        regrow_after_s=regrow_after_s,
        process_command=lambda replica: rank_command(of_replica(replica)),
        resize_refusal=refusal,
        check_command=check_command,
        lighthouse_command=lighthouse_command,
        dump_folder=folder,
        waits_for_folder=_setting(arguments, "job", "when_in_use") == "wait",
        is_pipelined=is_pipelined,
        log_dir=log_dir or folder / LAUNCH_LOGS,
        host=host,
        max_restarts=max_restarts,
        max_restart_delay_s=max_restart_delay_s,
        grace_s=grace_s,
        # torchft's own lighthouse does not accept departures.
        notifier_command=notifier_command if lighthouse == "builtin" else None,
    )
    plan.devices_of(0)
    return plan


def dump_folder(arguments: Sequence[str]) -> Path:
    """Return the `job.dump_folder` that `train` would use with `arguments`. Raises ConfigError if
    no configuration is given, or if `arguments` set an option that the launcher sets."""
    options = _options(arguments)
    for option, _ in options:
        if option in _OF_TRAIN:
            raise ConfigError(
                f"{option.replace('_', '-')} is given after --, but the launcher starts the "
                "processes: give --nproc-per-replica, --replicas or --spares before --."
            )
    refuse_keys_of_replicas(arguments)
    files = [value for option, value in options if option in ("--config", "--job.config_file")]
    if not files:
        raise ConfigError(
            "No configuration for train.py is given: end the command with -- --config FILE, such "
            "as -- --config configs/llama3_debug_ft.toml."
        )
    return Path(_setting(arguments, "job", "dump_folder") or _DEFAULT_DUMP_FOLDER)


def refuse_keys_of_replicas(arguments: Sequence[str]) -> None:
    """Raise ConfigError if `arguments` set a key that is set for each replica."""
    taken = [f"--fault_tolerance.{key}" for key in _OF_THE_LAUNCHER]
    for option, _ in _options(arguments):
        if option in taken:
            raise ConfigError(f"{option} is given, but it is set for each replica: omit it.")


def _setting(arguments: Sequence[str], section: str, key: str) -> str | None:
    """Return `[section] key` as `train` would read it; None if it is not set. Raises ConfigError if
    the file cannot be read."""
    options = _options(arguments)
    files = [value for option, value in options if option in ("--config", "--job.config_file")]
    try:
        tables = tomli.loads(Path(files[-1]).read_text(encoding="utf-8-sig")) if files else {}
    except (OSError, tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {files[-1]} cannot be read: {error}") from None
    overrides = [value for option, value in options if option == f"--{section}.{key}"]
    table = tables.get(section)
    in_file = table.get(key) if isinstance(table, dict) else None
    return overrides[-1] if overrides else in_file and str(in_file)


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that a process with `environment` would see, as CUDA_VISIBLE_DEVICES names
    them. Does not import torch; `devices` is the folder of the device files."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(len(list(devices.glob("nvidia[0-9]*"))))]
    names = [name.strip() for name in listed.split(",")]
    # CUDA ignores the list from the first invalid name on.
    return list(takewhile(lambda name: name not in ("", "-1"), names))


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options with their values, "" for those without; hyphens in names become
    underscores."""
    options = []
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, has_value, value = argument.partition("=")
            after = arguments[index + 1] if index + 1 < len(arguments) else "--"
            if not has_value and not after.startswith("--"):
                value = after
            options.append(("--" + name[2:].replace("-", "_"), value))
    return options
