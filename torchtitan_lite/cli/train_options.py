"""The command line of `torchtitan-lite train`: options, and arguments of the configuration."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.cli.parsers import similar_option, train_parser
from torchtitan_lite.config import Config
from torchtitan_lite.config.problems import tables_with
from torchtitan_lite.core.errors import ConfigError
from torchtitan_lite.core.imports import imports_without_gc
from torchtitan_lite.fault_tolerance.supervision.launcher.plan import refuse_keys_of_replicas
from torchtitan_lite.fault_tolerance.supervision.launcher.start_command import replica_arguments
from torchtitan_lite.fault_tolerance.supervision.local_ranks import check_process_count
from torchtitan_lite.training.run_config import parse_command_line


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `train` that are not keys of the configuration."""

    num_ranks: int = 1
    """Ranks per machine."""
    num_spares: int = 0
    """Spare processes per machine."""
    num_machines: int = 1
    """Machines that train, of all replicas."""
    num_replicas: int = 1
    endpoint: str = ""
    """HOST:PORT of the coordinator; empty for a run on this machine alone."""
    run_id: str = "default"
    join_timeout_s: int = 600
    kept: tuple[str, ...] = ()
    """The words of the options with which the run is resumed, whatever its number of ranks."""

    @property
    def world_size(self) -> int:
        """Number of ranks of each replica."""
        return self.num_ranks * self.num_machines // self.num_replicas

    def of_replica(self, replica: int) -> list[str]:
        """Return the arguments of a replica of this number; none if there are no others."""
        return replica_arguments(replica, self.num_replicas) if self.num_replicas > 1 else []


_OPTIONS = {
    "--nproc": "--nproc",
    "--nproc-per-node": "--nproc",
    "--nproc_per_node": "--nproc",
    "--spares": "--spares",
    "--nnodes": "--nnodes",
    "--replicas": "--replicas",
    "--rdzv-endpoint": "--rdzv-endpoint",
    "--rdzv_endpoint": "--rdzv-endpoint",
    "--rdzv-id": "--rdzv-id",
    "--rdzv_id": "--rdzv-id",
    "--rdzv-timeout-s": "--rdzv-timeout-s",
}
"""Options and their other spellings, which are torchrun's."""


def split_options(argv: Sequence[str]) -> tuple[TrainOptions, list[str]]:
    """Return the options, and the arguments without them. Raises ConfigError."""
    rest: list[str] = []
    values: dict[str, str] = {}
    arguments = iter(argv)
    for word in arguments:
        name, has_value, value = word.partition("=")
        if name in _OPTIONS:
            values[_OPTIONS[name]] = value if has_value else next(arguments, "")
        else:
            _check_spelling(name)
            rest.append(word)
    if values and "RANK" in os.environ:
        raise ConfigError(
            f"{next(iter(values))} is given, but torchrun has already started the processes: omit "
            "it."
        )
    options = TrainOptions(
        num_ranks=_num_ranks(values.get("--nproc", "1")),
        num_spares=_whole(values, "--spares", 0, least=0),
        num_machines=_whole(values, "--nnodes", 1, least=1),
        num_replicas=_whole(values, "--replicas", 1, least=1),
        endpoint=values.get("--rdzv-endpoint", ""),
        run_id=values.get("--rdzv-id", TrainOptions.run_id),
        join_timeout_s=_whole(values, "--rdzv-timeout-s", TrainOptions.join_timeout_s, least=1),
        kept=tuple(
            word for name, value in values.items() if name != "--nproc" for word in (name, value)
        ),
    )
    _check_endpoint(options, values)
    if options.num_replicas > 1:
        refuse_keys_of_replicas(rest)
    local_replicas = 1 if options.endpoint else options.num_replicas
    check_process_count(
        local_replicas * (options.num_ranks + options.num_spares),
        "--nproc, --spares and --replicas",
    )
    return options, rest


def _check_spelling(word: str) -> None:
    """Raise ConfigError for a mistyped option. One that is the name of a key without its section is
    reported with the keys."""
    known = ["--config", "--help", *_OPTIONS]
    meant = similar_option(word, known) if word.startswith("--") else None
    if meant and not tables_with(Config, word.removeprefix("--")):
        raise ConfigError(f"{word} is not an option of train. Did you mean {meant}?")


def _whole(values: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    value = values.get(name, str(default))
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f'{name} is "{value}", but must be a number of at least {least}.')
    return int(value)


def _num_ranks(value: str) -> int:
    if value == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f'--nproc is "{value}", but must be a number of at least 1, or "auto" for one process '
            "per GPU."
        )
    return int(value)


def _check_endpoint(options: TrainOptions, values: Mapping[str, str]) -> None:
    host, _, port = options.endpoint.rpartition(":")
    if "--rdzv-endpoint" in values and not (host and port.isdecimal()):
        raise ConfigError(
            f'--rdzv-endpoint is "{options.endpoint}", but must be HOST:PORT, such as '
            "10.0.0.1:29520: the address of `torchtitan-lite coordinator`."
        )
    of_machines = values.keys() & {"--rdzv-id", "--rdzv-timeout-s"} or options.num_machines > 1
    if of_machines and not options.endpoint:
        raise ConfigError(
            "--nnodes above 1, --rdzv-id and --rdzv-timeout-s need --rdzv-endpoint: start "
            "`torchtitan-lite coordinator --bind HOST:PORT` on one machine, and name its address "
            "on all."
        )
    if options.endpoint and options.num_machines % options.num_replicas:
        raise ConfigError(
            f"--nnodes {options.num_machines} is not a multiple of --replicas "
            f"{options.num_replicas}: each replica needs as many machines as the others."
        )


def checked_config(argv: Sequence[str], world_size: int) -> tuple[Config, Path]:
    """Parse the configuration and check it against a number of ranks. Returns it and its file.
    Raises ConfigError."""
    config, file = parse_command_line(argv, usage=lambda: train_parser().format_help())
    # Imports torch, so typos in the file are reported before.
    with imports_without_gc():
        from torchtitan_lite.training.checks.constraints import check_against

    check_against(config, world_size)
    return config, file
